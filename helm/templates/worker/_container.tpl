{{/* Flags of a worker. Takes root, pool, partition, spec. */}}
{{- define "inferq.workerFlags" -}}
{{- $flags := dict
    "model" .spec.model
    "served_model_name" .spec.modelName
    "queue" .spec.queue
    "partition" .partition
    "tensor_parallel_size" .spec.tensorParallelSize
    "drain_timeout_s" .spec.drainTimeoutSeconds
    "health_port" .spec.healthPort }}
{{- with .spec.adapters }}
{{- $_ := set $flags "lora_adapters" . }}
{{- end }}
{{- if not .spec.gpu.enabled }}
{{- $_ := set $flags "device" "cpu" }}
{{- end }}
{{- include "inferq.flags" (merge $flags (include "inferq.tracingFlags" .root | fromJson) .spec.settings) }}
{{- end -}}

{{/* The container of a worker, without its name. Takes root, pool, partition, spec. */}}
{{- define "inferq.workerContainer" -}}
image: {{ include "inferq.image" (dict "image" .spec.image "version" .root.Chart.AppVersion) | quote }}
imagePullPolicy: {{ .spec.image.pullPolicy }}
{{ include "inferq.containerBasics" . }}
args:
  - worker
  {{- include "inferq.workerFlags" . | nindent 2 }}
env:
  - name: INFERQ_WORKER_NAME
    valueFrom:
      fieldRef:
        fieldPath: metadata.name
  {{- include "inferq.redisEnv" (dict "root" .root "role" "worker") | nindent 2 }}
  - {name: HOME, value: /tmp}
  - {name: HF_HOME, value: /cache/huggingface}
  - {name: INFERQ_CACHE, value: /cache/inferq}
  - {name: TRITON_CACHE_DIR, value: /compiled/triton}
  - {name: TORCHINDUCTOR_CACHE_DIR, value: /compiled/inductor}
  {{- if .spec.huggingFace.offline }}
  - {name: HF_HUB_OFFLINE, value: "1"}
  {{- end }}
  {{- with .spec.huggingFace.tokenSecret }}
  {{- if .name }}
  - name: HF_TOKEN
    valueFrom:
      secretKeyRef:
        name: {{ .name | quote }}
        key: {{ .key | quote }}
  {{- end }}
  {{- end }}
  {{- with .spec.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .spec.extraEnvFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
ports:
  - name: health
    containerPort: {{ int .spec.healthPort }}
startupProbe:
  httpGet: {path: /startupz, port: health}
  periodSeconds: {{ int .spec.startupProbe.periodSeconds }}
  failureThreshold: {{ int .spec.startupProbe.failureThreshold }}
livenessProbe:
  httpGet: {path: /livez, port: health}
  periodSeconds: {{ int .spec.livenessProbe.periodSeconds }}
  timeoutSeconds: {{ int .spec.livenessProbe.timeoutSeconds }}
  failureThreshold: {{ int .spec.livenessProbe.failureThreshold }}
readinessProbe:
  httpGet: {path: /readyz, port: health}
  periodSeconds: {{ int .spec.readinessProbe.periodSeconds }}
  timeoutSeconds: {{ int .spec.readinessProbe.timeoutSeconds }}
  failureThreshold: {{ int .spec.readinessProbe.failureThreshold }}
{{- $resources := deepCopy .spec.resources }}
{{- if .spec.gpu.enabled }}
{{- $gpus := dict .spec.gpu.resourceName (printf "%d" (int .spec.tensorParallelSize)) }}
{{- $resources = mustMergeOverwrite $resources (dict "limits" $gpus) }}
{{- end }}
{{- with $resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  - {name: compiled, mountPath: /compiled}
  - {name: model-cache, mountPath: /cache}
  {{- if .spec.shm.enabled }}
  - {name: shm, mountPath: /dev/shm}
  {{- end }}
  {{- include "inferq.redisVolumeMount" .root | nindent 2 }}
  {{- with .spec.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* The volumes of a worker. Takes root, pool, spec. */}}
{{- define "inferq.workerVolumes" -}}
- name: tmp
  emptyDir: {}
- name: compiled
  emptyDir: {}
- name: model-cache
{{- with .spec.modelCache }}
{{- if eq .type "persistentVolumeClaim" }}
  persistentVolumeClaim:
    claimName: {{ default (include "inferq.modelCacheName" $) .existingClaim | quote }}
{{- else if eq .type "hostPath" }}
  hostPath:
    path: {{ .hostPath | quote }}
    type: DirectoryOrCreate
{{- else if .sizeLimit }}
  emptyDir:
    sizeLimit: {{ .sizeLimit | quote }}
{{- else }}
  emptyDir: {}
{{- end }}
{{- end }}
{{- if .spec.shm.enabled }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .spec.shm.size | quote }}
{{- end }}
{{ include "inferq.redisVolume" .root }}
{{- with .spec.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "inferq.modelCacheName" -}}
{{- include "inferq.name" (dict "root" .root "suffix" (printf "models-%s" .pool)) -}}
{{- end -}}
