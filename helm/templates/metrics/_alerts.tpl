{{/* Alerts, as a list of rules. */}}
{{- define "inferq.alerts" -}}
{{- $in := printf "namespace=%q" .Release.Namespace }}
{{- with .Values.metrics.alerts -}}
- alert: InferqQueueUnreadable
  expr: max by (queue) (inferq_queue_up{ {{- $in -}} }) == 0
  for: 5m
  annotations:
    summary: 'Nobody can read the queue {{ "{{" }} $labels.queue }}'
    description: Redis does not answer gateways and tasks, or not within their time.
- alert: InferqNoWorker
  expr: >-
    sum by (queue) (max by (queue, lane) (inferq_queue_depth{ {{- $in -}} })) > 0
    and on (queue) max by (queue) (inferq_queue_workers{ {{- $in -}} }) == 0
  for: {{ int .noWorkerSeconds }}s
  annotations:
    summary: 'Jobs wait on the queue {{ "{{" }} $labels.queue }} and no worker lives'
- alert: InferqJobsWait
  expr: max by (queue, lane) (inferq_queue_oldest_age_seconds{ {{- $in }},lane!="low"}) > {{ int .oldestJobSeconds }}
  for: 5m
  annotations:
    summary: 'A job of the lane {{ "{{" }} $labels.lane }} on {{ "{{" }} $labels.queue }} has waited {{ "{{" }} $value | humanizeDuration }}'
- alert: InferqDeadLetters
  expr: max by (queue) (delta(inferq_queue_dead_letters{ {{- $in -}} }[15m])) > 0
  annotations:
    summary: 'Jobs on the queue {{ "{{" }} $labels.queue }} became dead letters'
    description: Each cost several workers their life, or could not be read.
- alert: InferqWorkersDie
  expr: sum by (queue) (increase(inferq_job_takeovers_total{ {{- $in -}} }[10m])) > 3
  # longer than one update, whose workers hand jobs over, is seen
  for: 20m
  annotations:
    summary: 'Workers of the queue {{ "{{" }} $labels.queue }} keep losing jobs to others'
- alert: InferqPublishFails
  expr: sum by (queue) (rate(inferq_publish_calls_total{ {{- $in }},outcome="failed"}[5m])) > 0
  for: 10m
  annotations:
    summary: 'Workers of the queue {{ "{{" }} $labels.queue }} cannot publish tokens'
- alert: InferqGatewayErrors
  expr: >-
    sum(rate(inferq_gateway_requests_total{ {{- $in }},status=~"5.."}[5m]))
    / sum(rate(inferq_gateway_requests_total{ {{- $in -}} }[5m])) > {{ .gatewayErrorShare }}
  for: 10m
  annotations:
    summary: 'The gateway answers {{ "{{" }} $value | humanizePercentage }} of requests with an error of its own'
- alert: InferqWebhooksDead
  expr: max by (queue) (delta(inferq_webhooks_dead{ {{- $in -}} }[15m])) > 0
  annotations:
    summary: 'Webhooks of the queue {{ "{{" }} $labels.queue }} were given up'
{{- end }}
{{- end -}}
