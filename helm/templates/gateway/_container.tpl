{{/* Flags of a gateway. */}}
{{- define "inferq.gatewayFlags" -}}
{{- with .Values.gateway }}
{{- $flags := dict
    "host" "0.0.0.0"
    "port" .port
    "metrics_port" .metricsPort
    "metrics_host" "0.0.0.0"
    "queues" (include "inferq.queues" $ | fromJsonArray)
    "partitions" $.Values.partitions
    "models" (include "inferq.models" $ | fromJson)
    "accept_without_workers" .acceptWithoutWorkers
    "accept_webhooks" .acceptWebhooks
    "shutdown_delay_s" .shutdownDelaySeconds
    "shutdown_timeout_s" .shutdownTimeoutSeconds }}
{{- if .apiKeys.existingSecret }}
{{- $_ := set $flags "api_keys_file" (printf "/etc/inferq/api-keys/%s" .apiKeys.key) }}
{{- end }}
{{- include "inferq.flags" (merge $flags (include "inferq.sharedFlags" $ | fromJson) .settings) }}
{{- end }}
{{- end -}}

{{/* The container of a gateway, without its name. */}}
{{- define "inferq.gatewayContainer" -}}
{{- with .Values.gateway -}}
image: {{ include "inferq.image" (dict "image" .image "version" $.Chart.AppVersion) | quote }}
imagePullPolicy: {{ .image.pullPolicy }}
{{ include "inferq.containerBasics" . }}
args:
  - gateway
  {{- include "inferq.gatewayFlags" $ | nindent 2 }}
env:
  {{- include "inferq.redisEnv" (dict "root" $ "role" "gateway") | nindent 2 }}
  {{- include "inferq.batchesEnv" $ | nindent 2 }}
  {{- with .extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .extraEnvFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
ports:
  - name: http
    containerPort: {{ int .port }}
  - name: metrics
    containerPort: {{ int .metricsPort }}
startupProbe:
  httpGet: {path: /livez, port: http}
  periodSeconds: 2
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /livez, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /readyz, port: http}
  periodSeconds: 2
  timeoutSeconds: 3
  failureThreshold: 2
{{- with .resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  {{- if .apiKeys.existingSecret }}
  - {name: api-keys, mountPath: /etc/inferq/api-keys, readOnly: true}
  {{- end }}
  {{- include "inferq.redisVolumeMount" $ | nindent 2 }}
  {{- include "inferq.batchesVolumeMount" $ | nindent 2 }}
  {{- with .extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- end -}}
