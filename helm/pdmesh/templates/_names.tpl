{{/* Names and labels. */}}

{{- define "pdmesh.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "pdmesh.selectorLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "pdmesh.labels" -}}
{{ include "pdmesh.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 }}
{{- end -}}

{{/* Labels of one workload. Takes (dict "root" $ "role" ROLE "pool" POOL). */}}
{{- define "pdmesh.componentLabels" -}}
app.kubernetes.io/component: {{ .role }}
{{- if .pool }}
pdmesh.io/pool: {{ .pool }}
{{- end }}
{{- end -}}

{{- define "pdmesh.poolName" -}}
{{- printf "%s-%s-%s" (include "pdmesh.fullname" .root) .role .pool -}}
{{- end -}}

{{- define "pdmesh.serviceAccountName" -}}
{{- default (ternary (include "pdmesh.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end -}}

{{- define "pdmesh.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}
