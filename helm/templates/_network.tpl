{{/* Ways out of workers, gateways and tasks: names, the server, downloads, and webhooks. */}}
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
{{- with .root.Values.networkPolicy.extraEgress }}
{{ toYaml . }}
{{- end }}
{{- end -}}
