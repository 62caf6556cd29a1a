{{/* The pools as they are after defaults, and the addresses of their nodes. */}}

{{/* All pools as JSON: a list of {role, pool, name, leastReplicas, values}. */}}
{{- define "pdmesh.pools" -}}
{{- $root := . -}}
{{- $pools := list -}}
{{- range $role := list "prefill" "decode" "fused" -}}
{{- range $pool, $own := (get $root.Values (printf "%sPools" $role)) -}}
{{- $values := mergeOverwrite (deepCopy $root.Values.poolDefaults) (deepCopy ($own | default dict)) -}}
{{- $least := int (ternary $values.autoscaling.minReplicas $values.replicas $values.autoscaling.enabled) -}}
{{- $name := include "pdmesh.poolName" (dict "root" $root "role" $role "pool" $pool) -}}
{{- $pools = append $pools (dict "role" $role "pool" $pool "name" $name "leastReplicas" $least "values" $values) -}}
{{- end -}}
{{- end -}}
{{- dict "items" $pools | toJson -}}
{{- end -}}

{{/* Where the nodes of one role can be reached, as JSON: {"items": [host:port]}; of a pool that scales, by the name that stands for all of its
nodes. Routers and decode nodes must know a node by the same address. */}}
{{- define "pdmesh.addresses" -}}
{{- $root := .root -}}
{{- $role := .role -}}
{{- $addresses := list -}}
{{- range $entry := (include "pdmesh.pools" $root | fromJson).items -}}
{{- if eq $entry.role $role -}}
{{- $domain := include "pdmesh.poolDomain" (dict "root" $root "name" $entry.name) -}}
{{- $port := int $root.Values.ports.grpc -}}
{{- if $entry.values.autoscaling.enabled -}}
{{- $addresses = append $addresses (printf "dns:%s:%d" $domain $port) -}}
{{- else -}}
{{- range $index := until (int $entry.leastReplicas) -}}
{{- $addresses = append $addresses (printf "%s-%d.%s:%d" $entry.name $index $domain $port) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- dict "items" $addresses | toJson -}}
{{- end -}}

{{/* Whose certificates the release needs, as JSON. */}}
{{- define "pdmesh.certifiedRoles" -}}
{{- $roles := list "operator" "router" -}}
{{- range $role := list "prefill" "decode" "fused" -}}
{{- if get $.Values (printf "%sPools" $role) -}}{{- $roles = append $roles $role -}}{{- end -}}
{{- end -}}
{{- dict "items" $roles | toJson -}}
{{- end -}}

{{/* Whether Mooncake moves the cache of any pool: with certificates only where it was asked for. Empty if not. */}}
{{- define "pdmesh.opensMooncake" -}}
{{- if not .Values.tls.enabled -}}yes{{- end -}}
{{- range $entry := (include "pdmesh.pools" . | fromJson).items -}}
{{- $config := $entry.values.config -}}
{{- if or (eq (toString $config.transfer_protocol) "rdma") (eq (toString $config.data_plane) "mooncake") (eq (toString $config.data_plane_tls) "off") -}}yes{{- end -}}
{{- end -}}
{{- end -}}

{{- define "pdmesh.poolDomain" -}}
{{- printf "%s.%s.svc.%s" .name .root.Release.Namespace .root.Values.clusterDomain -}}
{{- end -}}

{{/* Seconds of a drain: what the configuration of a node says, else the default of pdmesh. */}}
{{- define "pdmesh.drainSeconds" -}}
{{- ternary (get . "drain_grace_s") 30 (hasKey . "drain_grace_s") | ceil | int -}}
{{- end -}}

{{/* A quantity of Kubernetes, such as 500m or 3Gi, as a number. */}}
{{- define "pdmesh.quantity" -}}
{{- $text := toString . -}}
{{- $unit := regexFind "(m|k|[MGTPE]|[KMGTPE]i)$" $text -}}
{{- $units := dict "" 1.0 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 -}}
{{- mulf (trimSuffix $unit $text | float64) (get $units $unit) -}}
{{- end -}}

{{/* Takes (dict "where" PATH "resources" RESOURCES). */}}
{{- define "pdmesh.validateResources" -}}
{{- $where := .where -}}
{{- $limits := .resources.limits | default dict -}}
{{- range $name, $request := .resources.requests | default dict -}}
{{- $limit := get $limits $name -}}
{{- $bothAreGiven := not (or (kindIs "invalid" $request) (kindIs "invalid" $limit) (eq (toString $limit) "")) -}}
{{- if and $bothAreGiven (lt (include "pdmesh.quantity" $limit | float64) (include "pdmesh.quantity" $request | float64)) -}}
{{- fail (printf "%s.resources: limits.%s=%v is below requests.%s=%v; a value that is not given is that of the chart" $where $name $limit $name $request) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Takes (dict "where" PATH "values" VALUES) of a pool. Where the arena lies in other memory, its limit is another one. */}}
{{- define "pdmesh.validateArena" -}}
{{- $limit := get (.values.resources.limits | default dict) "memory" -}}
{{- $arena := .values.config.memory -}}
{{- if and $limit $arena (eq (int .values.gpus) 0) (not .values.hugePages.amount) -}}
{{- $text := toString $arena | upper | nospace | trimSuffix "B" -}}
{{- $unit := regexFind "[KMGT]I?$" $text -}}
{{- $quantity := printf "%s%s" (trimSuffix $unit $text) (replace "I" "i" $unit | replace "K" (ternary "k" "K" (eq $unit "K"))) -}}
{{- if gt (include "pdmesh.quantity" $quantity | float64) (include "pdmesh.quantity" $limit | float64) -}}
{{- fail (printf "%s: config.memory=%v, the arena, exceeds resources.limits.memory=%v, of which weights take their part as well" .where $arena $limit) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Refuses two servers of one pod at one port. */}}
{{- define "pdmesh.validatePorts" -}}
{{- $everywhere := list "grpc" -}}
{{- if .Values.metrics.enabled -}}{{- $everywhere = append $everywhere "metrics" -}}{{- end -}}
{{- if .Values.tls.enabled -}}{{- $everywhere = append $everywhere "health" -}}{{- end -}}
{{- $ofRouters := ternary (append $everywhere "http") $everywhere .Values.router.http -}}
{{- range $names := list $ofRouters (append $everywhere "dataPlane") -}}
{{- $taken := dict -}}
{{- range $name := $names -}}
{{- $port := get $.Values.ports $name | int | toString -}}
{{- if hasKey $taken $port -}}
{{- fail (printf "ports.%s and ports.%s: both are %s, but a pod listens at them side by side" (get $taken $port) $name $port) -}}
{{- end -}}
{{- $_ := set $taken $port $name -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Refuses what no node or no mesh could run, where the schema cannot say it. */}}
{{- define "pdmesh.validate" -}}
{{- include "pdmesh.validatePorts" . -}}
{{- include "pdmesh.validateResources" (dict "where" "router" "resources" .Values.router.resources) -}}
{{- $pools := (include "pdmesh.pools" . | fromJson).items -}}
{{- range $entry := $pools -}}
{{- $where := printf "%sPools.%s" $entry.role $entry.pool -}}
{{- $values := $entry.values -}}
{{- if gt (len $entry.name) 52 -}}
{{- fail (printf "%s: its pods would be called %s, %d characters; give the release or the pool a shorter name, at most 52" $where $entry.name (len $entry.name)) -}}
{{- end -}}
{{- include "pdmesh.validateResources" (dict "where" $where "resources" $values.resources) -}}
{{- include "pdmesh.validateArena" (dict "where" $where "values" $values) -}}
{{- if and (gt (int $values.gpus) 0) (ne $entry.role "fused") -}}
{{- fail (printf "%s.gpus: %d given, but only fused nodes compute on CUDA; the data planes move host memory" $where (int $values.gpus)) -}}
{{- end -}}
{{- $ranks := int (default 1 $values.config.tensor_parallel) -}}
{{- if and (gt (int $values.gpus) 0) (gt $ranks 1) -}}
{{- fail (printf "%s: gpus=%d with config.tensor_parallel=%d, but tensor ranks compute on CPUs" $where (int $values.gpus) $ranks) -}}
{{- end -}}
{{- if and $values.autoscaling.enabled (gt (int $values.autoscaling.minReplicas) (int $values.autoscaling.maxReplicas)) -}}
{{- fail (printf "%s.autoscaling: minReplicas=%d must not exceed maxReplicas=%d" $where (int $values.autoscaling.minReplicas) (int $values.autoscaling.maxReplicas)) -}}
{{- end -}}
{{- range $other := $pools -}}
{{- if and (eq $entry.role "prefill") (eq $other.role "decode") -}}
{{- $theirs := int (default 1 $other.values.config.tensor_parallel) -}}
{{- if not (or (eq (mod $ranks $theirs) 0) (eq (mod $theirs $ranks) 0)) -}}
{{- fail (printf "%s.config.tensor_parallel=%d and decodePools.%s.config.tensor_parallel=%d: one must divide the other" $where $ranks $other.pool $theirs) -}}
{{- end -}}
{{- range $key := list "dtype" "prefix_granularity" "weight_version" -}}
{{- $ours := get $values.config $key -}}
{{- $theirValue := get $other.values.config $key -}}
{{- if ne (toString $ours) (toString $theirValue) -}}
{{- fail (printf "%s.config.%s=%v and decodePools.%s.config.%s=%v: the caches of nodes that differ in this do not fit together; set it under poolDefaults.config" $where $key (default "(default)" $ours) $other.pool $key (default "(default)" $theirValue)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $ingress := .Values.ingress -}}
{{- $gateway := .Values.gateway -}}
{{- if and (not .Values.router.http) (or $ingress.enabled (and $gateway.enabled $gateway.http.enabled)) -}}
{{- fail "ingress and gateway.http lead to the HTTP API of the routers: set router.http" -}}
{{- end -}}
{{- if and .Values.tls.enabled .Values.tls.clientCertificates (or $ingress.enabled $gateway.enabled) -}}
{{- fail "tls.clientCertificates: true, but an ingress or a gateway shows no certificate of a client; use tenants" -}}
{{- end -}}
{{- if $gateway.enabled -}}
{{- range $kind := list "http" "grpc" -}}
{{- $route := get $gateway $kind -}}
{{- if and $route.enabled (not $route.hostnames) -}}
{{- fail (printf "gateway.%s.hostnames: none given, but HTTP and gRPC need host names of their own; give some, or set gateway.%s.enabled to false" $kind $kind) -}}
{{- end -}}
{{- end -}}
{{- if and $gateway.http.enabled $gateway.grpc.enabled -}}
{{- range $name := $gateway.http.hostnames -}}
{{- if has $name $gateway.grpc.hostnames -}}
{{- fail (printf "gateway: %s is among the host names of both http and grpc, of which a gateway takes one alone" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.tls.enabled (not $gateway.authorityConfigMap) -}}
{{- fail "gateway.authorityConfigMap: none given, but with tls a gateway must know the authority of the routers' certificate" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.model.source.image (semverCompare "<1.33.0-0" .Capabilities.KubeVersion.Version) -}}
{{- fail (printf "model.source.image: image volumes need Kubernetes 1.33, this is %s" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- $tls := .Values.tls -}}
{{- if and $tls.enabled (not $tls.certManager.issuerRef) -}}
{{- range $role := (include "pdmesh.certifiedRoles" . | fromJson).items -}}
{{- if not (get $tls.secrets $role) -}}
{{- fail (printf "tls: give secrets.%s, or certManager.issuerRef" $role) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
