{{/* The pools with all their values, by name, as JSON: those of `worker`, changed by their own. */}}
{{- define "inferq.pools" -}}
{{- $pools := dict }}
{{- range $name, $own := .Values.pools }}
{{- /* null takes a pool of an earlier file of values away */}}
{{- if not (kindIs "invalid" $own) }}
{{- $pool := mustMergeOverwrite (deepCopy $.Values.worker) (deepCopy $own) }}
{{- $_ := set $pool "queue" (default $name $pool.queue) }}
{{- $_ := set $pool "modelName" (default (base $pool.model) $pool.servedModelName) }}
{{- $_ := set $pools $name $pool }}
{{- end }}
{{- end }}
{{- toJson $pools }}
{{- end -}}

{{/* Queues of all pools, once each, as a JSON list. */}}
{{- define "inferq.queues" -}}
{{- $queues := list }}
{{- range $name, $pool := include "inferq.pools" . | fromJson }}
{{- $queues = append $queues $pool.queue }}
{{- end }}
{{- $queues | uniq | sortAlpha | toJson }}
{{- end -}}

{{/* Queue by the name that clients give as model, as JSON. */}}
{{- define "inferq.models" -}}
{{- $models := dict }}
{{- range $name, $pool := include "inferq.pools" . | fromJson }}
{{- range prepend (keys $pool.adapters) $pool.modelName }}
{{- $queue := get $models . }}
{{- if and $queue (ne $queue $pool.queue) }}
{{- fail (printf "pools.%s: the model name %s is served by the queue %s already; give one of them another servedModelName." $name . $queue) }}
{{- end }}
{{- $_ := set $models . $pool.queue }}
{{- end }}
{{- end }}
{{- toJson $models }}
{{- end -}}

{{/* Name of a pool's objects. Takes root, pool (its name), partition. */}}
{{- define "inferq.workerName" -}}
{{- $suffix := printf "worker-%s" .pool }}
{{- if gt (int .root.Values.partitions) 1 }}
{{- $suffix = printf "%s-p%d" $suffix (int .partition) }}
{{- end }}
{{- include "inferq.name" (dict "root" .root "suffix" $suffix) }}
{{- end -}}

{{/* Labels that tell a pool's pods from all others. Takes root, pool, partition. */}}
{{- define "inferq.workerSelectorLabels" -}}
{{ include "inferq.selectorLabels" (dict "root" .root "component" "worker") }}
inferq-pool: {{ .pool | quote }}
inferq-partition: {{ int .partition | quote }}
{{- end -}}

{{/* Labels of a pool's objects. Takes root, pool, partition. */}}
{{- define "inferq.workerLabels" -}}
{{ include "inferq.labels" (dict "root" .root "component" "worker") }}
inferq-pool: {{ .pool | quote }}
inferq-partition: {{ int .partition | quote }}
{{- end -}}

{{/* Seconds that a pool's workers have to end. */}}
{{- define "inferq.gracePeriod" -}}
{{- add (int .drainTimeoutSeconds) (int .gracePeriodMarginSeconds) -}}
{{- end -}}
