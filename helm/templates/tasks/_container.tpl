{{/* Flags of tasks. */}}
{{- define "inferq.tasksFlags" -}}
{{- with .Values.tasks }}
{{- $flags := dict
    "queues" (include "inferq.queues" $ | fromJsonArray)
    "partitions" $.Values.partitions
    "health_port" .healthPort
    "shutdown_timeout_s" .shutdownTimeoutSeconds }}
{{- if .webhooks.existingSecret }}
{{- $_ := set $flags "webhook_secrets_file" (printf "/etc/inferq/webhooks/%s" .webhooks.key) }}
{{- end }}
{{- include "inferq.flags" (merge $flags (include "inferq.sharedFlags" $ | fromJson) .settings) }}
{{- end }}
{{- end -}}

{{/* The container of tasks, without its name. */}}
{{- define "inferq.tasksContainer" -}}
{{- with .Values.tasks -}}
image: {{ include "inferq.image" (dict "image" $.Values.gateway.image "version" $.Chart.AppVersion) | quote }}
imagePullPolicy: {{ $.Values.gateway.image.pullPolicy }}
{{ include "inferq.containerBasics" . }}
args:
  - tasks
  {{- include "inferq.tasksFlags" $ | nindent 2 }}
env:
  {{- include "inferq.redisEnv" (dict "root" $ "role" "tasks") | nindent 2 }}
  {{- include "inferq.batchesEnv" $ | nindent 2 }}
  {{- with .extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .extraEnvFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
ports:
  - name: health
    containerPort: {{ int .healthPort }}
startupProbe:
  httpGet: {path: /livez, port: health}
  periodSeconds: 2
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /livez, port: health}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /readyz, port: health}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
{{- with .resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  {{- if .webhooks.existingSecret }}
  - {name: webhooks, mountPath: /etc/inferq/webhooks, readOnly: true}
  {{- end }}
  {{- include "inferq.redisVolumeMount" $ | nindent 2 }}
  {{- include "inferq.batchesVolumeMount" $ | nindent 2 }}
  {{- with .extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- end -}}
