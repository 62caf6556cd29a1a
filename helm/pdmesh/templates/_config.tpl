{{/* The configuration file of a node: what the chart decides, then what the user gave. */}}

{{- define "pdmesh.modelPath" -}}
{{- $source := .Values.model.source -}}
{{- if $source.alias -}}{{ $source.alias }}
{{- else if $source.pvc -}}/models/{{ $source.pvc.path }}
{{- else if $source.image -}}/models/{{ $source.image.path }}
{{- else -}}/models/{{ base $source.url.url }}
{{- end -}}
{{- end -}}

{{/* Takes (dict "root" $ "role" ROLE "config" CONFIG). */}}
{{- define "pdmesh.nodeConfig" -}}
{{- $root := .root -}}
{{- $own := dict "role" .role "model" (include "pdmesh.modelPath" $root) "host" $root.Values.listenHost "port" (int $root.Values.ports.grpc) -}}
{{- with $root.Values.model.name -}}{{- $_ := set $own "served_model_name" . -}}{{- end -}}
{{- if $root.Values.metrics.enabled -}}{{- $_ := set $own "metrics_port" (int $root.Values.ports.metrics) -}}{{- end -}}
{{- with $root.Values.telemetry.otlpEndpoint -}}{{- $_ := set $own "otlp_endpoint" . -}}{{- end -}}
{{- if eq .role "router" -}}
{{- if $root.Values.router.http -}}
{{- $host := ternary (printf "[%s]" $root.Values.listenHost) $root.Values.listenHost (contains ":" $root.Values.listenHost) -}}
{{- $_ := set $own "http" (printf "%s:%d" $host (int $root.Values.ports.http)) -}}
{{- end -}}
{{- range $role := list "prefill" "decode" "fused" -}}
{{- $_ := set $own $role (include "pdmesh.addresses" (dict "root" $root "role" $role) | fromJson).items -}}
{{- end -}}
{{- end -}}
{{- if eq .role "decode" -}}
{{- $_ := set $own "prefill" (include "pdmesh.addresses" (dict "root" $root "role" "prefill") | fromJson).items -}}
{{- end -}}
{{- if has .role (list "prefill" "decode") -}}
{{- $_ := set $own "data_plane_port" (int $root.Values.ports.dataPlane) -}}
{{- end -}}
{{- if $root.Values.tls.enabled -}}
{{- $_ := set $own "tls_cert" "/etc/pdmesh-tls/tls.crt" -}}
{{- $_ := set $own "tls_key" "/etc/pdmesh-tls/tls.key" -}}
{{- $_ := set $own "tls_ca" "/etc/pdmesh-tls/ca.crt" -}}
{{- $_ := set $own "tls_domain" $root.Values.tls.domain -}}
{{- $_ := set $own "health_port" (int $root.Values.ports.health) -}}
{{- if eq .role "router" -}}{{- $_ := set $own "client_certificates" $root.Values.tls.clientCertificates -}}{{- end -}}
{{- end -}}
{{- if and (eq .role "router") $root.Values.tenants.secretName -}}
{{- $_ := set $own "tenants" (printf "/etc/pdmesh-tenants/%s" $root.Values.tenants.key) -}}
{{- end -}}
{{- if gt (int .gpus) 0 -}}{{- $_ := set $own "device" "cuda" -}}{{- end -}}
{{- mergeOverwrite $own (deepCopy .config) | toYaml -}}
{{- end -}}
