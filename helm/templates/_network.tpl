{{/* Ways out of workers, gateways and tasks: names, the server, downloads, webhooks, files of
batches, and traces. */}}
{{- define "inferq.egress" -}}
- ports:
    - {protocol: UDP, port: 53}
    - {protocol: TCP, port: 53}
- ports:
    {{- range (include "inferq.redis" .root | fromJson).addresses }}
    - {protocol: TCP, port: {{ splitList ":" . | last }}}
    {{- end }}
  {{- if .root.Values.valkey.enabled }}
  to:
    - podSelector:
        matchLabels:
          {{- include "inferq.selectorLabels" (dict "root" .root "component" "valkey") | nindent 10 }}
  {{- end }}
{{- if and (eq .component "worker") .root.Values.networkPolicy.allowDownloads }}
- ports:
    - {protocol: TCP, port: 443}
{{- end }}
{{- if and (eq .component "tasks") .root.Values.networkPolicy.webhookPorts }}
- ports:
    {{- range .root.Values.networkPolicy.webhookPorts }}
    - {protocol: TCP, port: {{ int . }}}
    {{- end }}
{{- end }}
{{- with .root.Values.batches }}
{{- if and (ne $.component "worker") .enabled (eq .storage "s3") }}
- ports:
    - {protocol: TCP, port: {{ include "inferq.portOf" (default "https://aws" .s3.endpoint) }}}
{{- end }}
{{- end }}
{{- with .root.Values.tracing.endpoint }}
- ports:
    - {protocol: TCP, port: {{ include "inferq.portOf" . }}}
{{- end }}
{{- with .root.Values.networkPolicy.extraEgress }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Whoever may read a component's metrics. Takes root, component. */}}
{{- define "inferq.metricsIngress" -}}
{{- with .root.Values.networkPolicy.metricsFrom -}}
- ports:
    - {protocol: TCP, port: {{ ternary "metrics" "health" (eq $.component "gateway") }}}
  from:
    {{- toYaml . | nindent 4 }}
{{- end }}
{{- end -}}
