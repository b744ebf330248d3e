{{/* Refuses values that cannot work together; what one value may be is in values.schema.json. */}}
{{- define "inferq.check" -}}
{{- if not (include "inferq.pools" . | fromJson) }}
{{- fail "pools: name at least one pool of workers, such as pools.chat.model=Qwen/Qwen3-8B." }}
{{- end }}
{{- include "inferq.checkServer" . }}
{{- $served := dict }}
{{- range $name, $pool := include "inferq.pools" . | fromJson }}
{{- include "inferq.checkPool" (dict "root" $ "name" $name "pool" $pool "served" $served) }}
{{- end }}
{{- $_ := include "inferq.models" . }}
{{- include "inferq.checkScalers" . }}
{{- include "inferq.checkBatches" . }}
{{- include "inferq.checkMetrics" . }}
{{- with .Values.gateway }}
{{- if and .enabled .ingress.enabled (not .ingress.hosts) }}
{{- fail "gateway.ingress.enabled needs gateway.ingress.hosts." }}
{{- end }}
{{- if and .enabled .httpRoute.enabled (not .httpRoute.parentRefs) }}
{{- fail "gateway.httpRoute.enabled needs gateway.httpRoute.parentRefs." }}
{{- end }}
{{- if and .enabled .acceptWebhooks (not $.Values.tasks.enabled) }}
{{- fail "gateway.acceptWebhooks needs tasks.enabled: nothing else delivers them." }}
{{- end }}
{{- if and .enabled .acceptWebhooks (not $.Values.tasks.webhooks.existingSecret) }}
{{- fail "gateway.acceptWebhooks needs tasks.webhooks.existingSecret: what is not signed is not delivered." }}
{{- end }}
{{- if and (not .enabled) (or .acceptWebhooks .ingress.enabled .httpRoute.enabled .autoscaling.enabled) }}
{{- fail "gateway.enabled is false: its acceptWebhooks, ingress, httpRoute and autoscaling must be off too." }}
{{- end }}
{{- if and .autoscaling.enabled (gt (int .autoscaling.minReplicas) (int .autoscaling.maxReplicas)) }}
{{- fail "gateway.autoscaling: minReplicas is more than maxReplicas." }}
{{- end }}
{{- if and .autoscaling.enabled (not (dig "requests" "cpu" "" .resources)) }}
{{- fail "gateway.autoscaling aims at a share of gateway.resources.requests.cpu: set it." }}
{{- end }}
{{- end }}
{{- if and .Values.tasks.webhooks.existingSecret (not .Values.tasks.enabled) }}
{{- fail "tasks.webhooks.existingSecret needs tasks.enabled." }}
{{- end }}
{{- end -}}

{{- define "inferq.checkServer" -}}
{{- with .Values.redis }}
{{- if $.Values.valkey.enabled }}
{{- if or .addresses .auth.existingSecret .tls.enabled }}
{{- fail "redis describes a server that is there already: set valkey.enabled=false, or leave redis as it is." }}
{{- end }}
{{- else if not .addresses }}
{{- fail "valkey.enabled is false: redis.addresses must say where the server is." }}
{{- end }}
{{- if and (eq .mode "standalone") (gt (len .addresses) 1) }}
{{- fail "redis.addresses: a standalone server has one address; set redis.mode to sentinel or cluster." }}
{{- end }}
{{- if and (eq .mode "sentinel") (not .sentinelService) }}
{{- fail "redis.mode=sentinel needs redis.sentinelService, the name of the primary." }}
{{- end }}
{{- if and (eq .mode "cluster") (ne (int .database) 0) }}
{{- fail "redis.database: a Cluster has database 0 only." }}
{{- end }}
{{- if and .tls.caSecret.name (not .tls.enabled) }}
{{- fail "redis.tls.caSecret needs redis.tls.enabled." }}
{{- end }}
{{- if and .auth.sentinelPasswordKey (or (ne .mode "sentinel") (not .auth.existingSecret)) }}
{{- fail "redis.auth.sentinelPasswordKey needs redis.mode=sentinel and redis.auth.existingSecret." }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Takes root, name, pool, served (model name by queue, of the pools before). */}}
{{- define "inferq.checkPool" -}}
{{- $at := printf "pools.%s" .name }}
{{- $root := .root }}
{{- if not .pool.model }}
{{- fail (printf "%s.model: say which model to serve." $at) }}
{{- end }}
{{- $other := get .served .pool.queue }}
{{- if and $other (ne $other .pool.modelName) }}
{{- fail (printf "%s: the queue %s serves %s already; a queue serves one model." $at .pool.queue $other) }}
{{- end }}
{{- $_ := set .served .pool.queue .pool.modelName }}
{{- if hasKey .pool.adapters .pool.modelName }}
{{- fail (printf "%s.adapters: %s is the name of the model itself." $at .pool.modelName) }}
{{- end }}
{{- $most := int .pool.replicas }}
{{- with .pool.autoscaling }}
{{- if ne .type "none" }}
{{- $most = int .maxReplicas }}
{{- if gt (int .minReplicas) (int .maxReplicas) }}
{{- fail (printf "%s.autoscaling: minReplicas is more than maxReplicas." $at) }}
{{- end }}
{{- end }}
{{- if and (eq .type "hpa") (eq (int .minReplicas) 0) }}
{{- fail (printf "%s.autoscaling: only keda scales from zero; set minReplicas to 1 or more." $at) }}
{{- end }}
{{- if and (eq .type "hpa") (not .hpa.metrics) (not $root.Values.gateway.enabled) (not $root.Values.tasks.enabled) }}
{{- fail (printf "%s.autoscaling: gateways or tasks tell the outstanding tokens, and neither is enabled." $at) }}
{{- end }}
{{- if and (eq .type "keda") (eq (int .minReplicas) 0) $root.Values.gateway.enabled (not $root.Values.gateway.acceptWithoutWorkers) }}
{{- fail (printf "%s scales to zero: with gateway.acceptWithoutWorkers=false nothing would ever start it." $at) }}
{{- end }}
{{- end }}
{{- with .pool.modelCache }}
{{- if and (eq .type "hostPath") (not .hostPath) }}
{{- fail (printf "%s.modelCache.hostPath: say which folder of the node." $at) }}
{{- end }}
{{- if and (eq .type "persistentVolumeClaim") (not .existingClaim) (has "ReadWriteOncePod" .accessModes) (gt (mul $most (int $root.Values.partitions)) 1) }}
{{- fail (printf "%s.modelCache.accessModes: with ReadWriteOncePod only one of the workers could start." $at) }}
{{- end }}
{{- end }}
{{- if and (eq .pool.strategy.type "RollingUpdate") (eq (toString .pool.strategy.maxSurge) "0") (eq (toString .pool.strategy.maxUnavailable) "0") }}
{{- fail (printf "%s.strategy: maxSurge and maxUnavailable cannot both be 0." $at) }}
{{- end }}
{{- end -}}

{{/* KEDA and a HorizontalPodAutoscaler would both start workers for the same jobs. */}}
{{- define "inferq.checkScalers" -}}
{{- $scaled := dict }}
{{- range $name, $pool := include "inferq.pools" . | fromJson }}
{{- with $pool.autoscaling }}
{{- if or (eq .type "keda") (and (eq .type "hpa") (not .hpa.metrics)) }}
{{- $other := get $scaled $pool.queue }}
{{- if and $other (ne $other .type) }}
{{- fail (printf "pools.%s.autoscaling: the queue %s is scaled by keda and by hpa on outstanding tokens at once; choose one." $name $pool.queue) }}
{{- end }}
{{- $_ := set $scaled $pool.queue .type }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "inferq.checkBatches" -}}
{{- with .Values.batches }}
{{- if and .enabled (not (and $.Values.gateway.enabled $.Values.tasks.enabled)) }}
{{- fail "batches.enabled needs gateway.enabled and tasks.enabled: gateways take batches, tasks run them." }}
{{- end }}
{{- if and .s3.url (not (and .enabled (eq .storage "s3"))) }}
{{- fail "batches.s3.url is given: set batches.enabled=true and batches.storage=s3." }}
{{- end }}
{{- if and .enabled (eq .storage "s3") (not .s3.url) }}
{{- fail "batches.storage=s3 needs batches.s3.url." }}
{{- end }}
{{- if and .enabled (eq .storage "persistentVolumeClaim") (not .persistentVolumeClaim.existingClaim) (has "ReadWriteOncePod" .persistentVolumeClaim.accessModes) }}
{{- fail "batches.persistentVolumeClaim.accessModes: gateways and tasks share the files; ReadWriteOncePod lets one pod in." }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "inferq.checkMetrics" -}}
{{- with .Values.metrics }}
{{- if and .podMonitor.enabled $.Values.networkPolicy.enabled (not $.Values.networkPolicy.metricsFrom) }}
{{- fail "networkPolicy.metricsFrom: say where Prometheus is, else metrics.podMonitor gets no answer." }}
{{- end }}
{{- if and .alerts.enabled (not $.Values.gateway.enabled) (not $.Values.tasks.enabled) }}
{{- fail "metrics.alerts: gateways or tasks tell a queue's figures, and neither is enabled." }}
{{- end }}
{{- end }}
{{- if and .Values.gateway.enabled (eq (int .Values.gateway.port) (int .Values.gateway.metricsPort)) }}
{{- fail "gateway.metricsPort: must be another one than gateway.port." }}
{{- end }}
{{- end -}}
