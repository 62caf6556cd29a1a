{{/* What the pods of all roles have in common. Each takes (dict "root" $ "role" ROLE "pool" POOL "name" NAME "values" VALUES). */}}

{{- define "pdmesh.podMetadata" -}}
{{- $root := .root -}}
labels:
  {{- /* No version: a chart that makes the same pods must not replace them. */}}
  {{- include "pdmesh.selectorLabels" $root | nindent 2 }}
  {{- include "pdmesh.componentLabels" . | nindent 2 }}
  {{- range $key, $value := mergeOverwrite (deepCopy $root.Values.podLabels) (.values.podLabels | default dict) }}
  {{ $key }}: {{ $value | quote }}
  {{- end }}
annotations:
  # A node reads its file at start: another file, another node. But a decode node meets prefill nodes that were added since when a
  # request names them, and must not lose its cache for them.
  {{- $config := include "pdmesh.nodeConfig" (dict "root" $root "role" .role "config" .values.config "gpus" (.values.gpus | default 0)) | fromYaml }}
  pdmesh.io/config-checksum: {{ ternary (omit $config "prefill") $config (eq .role "decode") | toYaml | sha256sum }}
  {{- range $key, $value := mergeOverwrite (deepCopy $root.Values.podAnnotations) (.values.podAnnotations | default dict) }}
  {{ $key }}: {{ $value | quote }}
  {{- end }}
{{- end -}}

{{- define "pdmesh.scheduling" -}}
{{- $root := .root -}}
{{- $scheduling := mergeOverwrite (deepCopy $root.Values.scheduling) (.values.scheduling | default dict) -}}
{{- with $scheduling.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $scheduling.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $scheduling.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $scheduling.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $scheduling.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $scheduling.topologySpread }}
topologySpreadConstraints:
  {{- range . }}
  - topologyKey: {{ .topologyKey }}
    maxSkew: {{ .maxSkew | default 1 }}
    whenUnsatisfiable: {{ .whenUnsatisfiable | default "ScheduleAnyway" }}
    labelSelector:
      matchLabels:
        {{- include "pdmesh.selectorLabels" $root | nindent 8 }}
        {{- include "pdmesh.componentLabels" $ | nindent 8 }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "pdmesh.podSpec" -}}
{{- $root := .root -}}
{{- $values := .values -}}
{{- $source := $root.Values.model.source -}}
{{- $isCompute := ne .role "router" -}}
{{- $usesTls := $root.Values.tls.enabled -}}
{{- $hasTenants := and (not $isCompute) $root.Values.tenants.secretName -}}
{{- $usesHugePages := and $isCompute $values.hugePages.amount -}}
serviceAccountName: {{ include "pdmesh.serviceAccountName" $root }}
automountServiceAccountToken: false
# A Service called pdmesh would otherwise become PDMESH_PORT in the environment of every pod.
enableServiceLinks: false
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext: {{- toYaml $root.Values.podSecurityContext | nindent 2 }}
terminationGracePeriodSeconds: {{ include "pdmesh.terminationSeconds" . }}
{{- include "pdmesh.scheduling" . }}
{{- if $source.url }}
initContainers:
  - name: fetch-model
    image: {{ include "pdmesh.image" $root }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    args: [fetch, {{ $source.url.url | quote }}, --sha256, {{ $source.url.sha256 | quote }}, --to, {{ include "pdmesh.modelPath" $root | quote }}]
    securityContext: {{- include "pdmesh.containerSecurity" (dict "lockMemory" false) | nindent 6 }}
    resources: {{- toYaml $values.resources | nindent 6 }}
    volumeMounts:
      - {name: models, mountPath: /models}
      - {name: tmp, mountPath: /tmp}
{{- end }}
containers:
  - name: {{ .role }}
    image: {{ include "pdmesh.image" $root }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    args: [{{ .role }}, --config, /etc/pdmesh/node.yaml]
    env:
      {{- include "pdmesh.environment" . | nindent 6 }}
    ports:
      - {name: grpc, containerPort: {{ $root.Values.ports.grpc }}}
      {{- if and (not $isCompute) $root.Values.router.http }}
      - {name: http, containerPort: {{ $root.Values.ports.http }}}
      {{- end }}
      {{- if has .role (list "prefill" "decode") }}
      - {name: data-plane, containerPort: {{ $root.Values.ports.dataPlane }}}
      {{- end }}
      {{- if $usesTls }}
      - {name: health, containerPort: {{ $root.Values.ports.health }}}
      {{- end }}
      {{- if $root.Values.metrics.enabled }}
      - {name: metrics, containerPort: {{ $root.Values.ports.metrics }}}
      {{- end }}
    {{- include "pdmesh.probes" . | nindent 4 }}
    {{- if not $isCompute }}
    lifecycle:
      preStop:
        sleep: {seconds: {{ $root.Values.router.preStopSleepSeconds }}}
    {{- end }}
    securityContext: {{- include "pdmesh.containerSecurity" (dict "lockMemory" (and $isCompute $values.rdma.resource)) | nindent 6 }}
    resources: {{- include "pdmesh.resources" . | nindent 6 }}
    volumeMounts:
      - {name: config, mountPath: /etc/pdmesh, readOnly: true}
      - {name: tmp, mountPath: /tmp}
      {{- if $source.alias }}
      - {name: cache, mountPath: /cache}
      {{- else }}
      - {name: models, mountPath: /models, readOnly: true}
      {{- end }}
      {{- if $usesTls }}
      - {name: tls, mountPath: /etc/pdmesh-tls, readOnly: true}
      {{- end }}
      {{- if $hasTenants }}
      - {name: tenants, mountPath: /etc/pdmesh-tenants, readOnly: true}
      {{- end }}
      {{- if $usesHugePages }}
      - {name: huge-pages, mountPath: /dev/hugepages}
      {{- end }}
volumes:
  - name: config
    configMap:
      name: {{ .name }}
  - name: tmp
    emptyDir: {}
  {{- if $source.alias }}
  - name: cache
    emptyDir: {}
  {{- else if $source.pvc }}
  - name: models
    persistentVolumeClaim:
      claimName: {{ $source.pvc.claimName }}
      readOnly: true
  {{- else if $source.image }}
  - name: models
    image:
      reference: {{ $source.image.reference }}
      pullPolicy: {{ $source.image.pullPolicy | default "IfNotPresent" }}
  {{- else }}
  - name: models
    emptyDir: {}
  {{- end }}
  {{- if $usesTls }}
  - name: tls
    secret:
      secretName: {{ include "pdmesh.tlsSecret" (dict "root" $root "role" .role) }}
      defaultMode: 0440
  {{- end }}
  {{- if $hasTenants }}
  - name: tenants
    secret:
      secretName: {{ $root.Values.tenants.secretName }}
      defaultMode: 0440
  {{- end }}
  {{- if $usesHugePages }}
  - name: huge-pages
    emptyDir:
      medium: HugePages-{{ $values.hugePages.pageSize }}
  {{- end }}
{{- end -}}

{{- define "pdmesh.tlsSecret" -}}
{{- get .root.Values.tls.secrets .role | default (printf "%s-%s-tls" (include "pdmesh.fullname" .root) .role) -}}
{{- end -}}

{{- define "pdmesh.terminationSeconds" -}}
{{- $drain := int (include "pdmesh.drainSeconds" .values.config) -}}
{{- $sleep := ternary (int .root.Values.router.preStopSleepSeconds) 0 (eq .role "router") -}}
{{- add $drain $sleep (int .root.Values.terminationMarginSeconds) -}}
{{- end -}}

{{/* Each name once, or an API server refuses the object: what is set for one workload wins over what is set for all, and that over the chart. */}}
{{- define "pdmesh.environment" -}}
{{- $entries := list -}}
{{- $seen := list -}}
{{- $all := concat (include "pdmesh.ownEnvironment" . | fromYamlArray) (.root.Values.extraEnv | default list) (.values.extraEnv | default list) -}}
{{- range $first := $all -}}
{{- if not (has $first.name $seen) -}}
{{- $seen = append $seen $first.name -}}
{{- $last := $first -}}
{{- range $entry := $all -}}{{- if eq $entry.name $first.name -}}{{- $last = $entry -}}{{- end -}}{{- end -}}
{{- $entries = append $entries $last -}}
{{- end -}}
{{- end -}}
{{- toYaml $entries -}}
{{- end -}}

{{/* What differs from pod to pod, and what the file cannot know. */}}
{{- define "pdmesh.ownEnvironment" -}}
- name: PDMESH_NODE_ID
  valueFrom:
    fieldRef: {fieldPath: metadata.name}
- name: HOME
  value: /tmp
- name: XDG_CACHE_HOME
  value: {{ ternary "/cache" "/tmp/cache" (hasKey .root.Values.model.source "alias") }}
{{- if ne .role "router" }}
- name: PDMESH_ADVERTISE_HOST
  value: $(PDMESH_NODE_ID).{{ include "pdmesh.poolDomain" . }}
{{- /* The kubelet knows what a quota leaves of the machine, the node does not. */}}
{{- $cpus := ternary "limits.cpu" (ternary "requests.cpu" "" (hasKey (.values.resources.requests | default dict) "cpu")) (hasKey (.values.resources.limits | default dict) "cpu") }}
{{- if and $cpus (not (hasKey .values.config "num_threads")) (eq (int (default 1 .values.config.tensor_parallel)) 1) }}
- name: PDMESH_NUM_THREADS
  valueFrom:
    resourceFieldRef: {containerName: {{ .role }}, resource: {{ $cpus }}, divisor: "1"}
- name: OMP_NUM_THREADS
  value: $(PDMESH_NUM_THREADS)
{{- else if hasKey .values.config "num_threads" }}
- name: OMP_NUM_THREADS
  value: {{ .values.config.num_threads | quote }}
{{- end }}
- name: OMP_WAIT_POLICY
  value: PASSIVE
{{- end }}
{{- end -}}

{{- define "pdmesh.probes" -}}
{{- $probes := mergeOverwrite (deepCopy .root.Values.probes) (.values.probes | default dict) -}}
{{- $port := int (ternary .root.Values.ports.health .root.Values.ports.grpc .root.Values.tls.enabled) -}}
# The port opens when the model is loaded.
startupProbe:
  grpc: {port: {{ $port }}, service: pdmesh.liveness}
  periodSeconds: 5
  timeoutSeconds: {{ $probes.timeoutSeconds }}
  failureThreshold: {{ div (add (int $probes.startupSeconds) 4) 5 }}
# Knows about peers and drains.
readinessProbe:
  grpc: {port: {{ $port }}}
  periodSeconds: {{ $probes.readinessPeriodSeconds }}
  timeoutSeconds: {{ $probes.timeoutSeconds }}
  failureThreshold: 2
# Knows about progress, and of nothing that a restart would not mend.
livenessProbe:
  grpc: {port: {{ $port }}, service: pdmesh.liveness}
  periodSeconds: {{ $probes.livenessPeriodSeconds }}
  timeoutSeconds: {{ $probes.timeoutSeconds }}
  failureThreshold: {{ $probes.livenessFailureThreshold }}
{{- end -}}

{{- define "pdmesh.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- if .lockMemory }}
  # RDMA pins the memory that it reaches.
  add: [IPC_LOCK]
  {{- end }}
{{- end -}}

{{- define "pdmesh.resources" -}}
{{- $resources := deepCopy (.values.resources | default dict) -}}
{{- if ne .role "router" -}}
{{- $extra := dict -}}
{{- if gt (int .values.gpus) 0 -}}{{- $_ := set $extra .values.gpuResource (int .values.gpus) -}}{{- end -}}
{{- with .values.rdma -}}
{{- if .resource -}}{{- $_ := set $extra .resource (int (.count | default 1)) -}}{{- end -}}
{{- end -}}
{{- with .values.hugePages -}}
{{- if .amount -}}{{- $_ := set $extra (printf "hugepages-%s" .pageSize) .amount -}}{{- end -}}
{{- end -}}
{{- $_ := set $resources "requests" (mergeOverwrite (deepCopy ($resources.requests | default dict)) (deepCopy $extra)) -}}
{{- $_ := set $resources "limits" (mergeOverwrite (deepCopy ($resources.limits | default dict)) (deepCopy $extra)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
