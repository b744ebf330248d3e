{{/* How KEDA reaches the server, as metadata of a trigger. */}}
{{- define "inferq.kedaConnection" -}}
{{- $redis := include "inferq.redis" . | fromJson }}
{{- $namespace := .Release.Namespace }}
{{- if eq $redis.mode "standalone" }}
{{- /* KEDA runs in another namespace. */}}
{{- $address := first $redis.addresses }}
{{- if .Values.valkey.enabled }}
{{- $address = printf "%s.%s.svc:6379" (include "inferq.name" (dict "root" . "suffix" "valkey")) $namespace }}
{{- end }}
address: {{ $address | quote }}
{{- else }}
addresses: {{ join "," $redis.addresses | quote }}
{{- end }}
{{- if ne $redis.mode "cluster" }}
databaseIndex: {{ int $redis.database | quote }}
{{- end }}
{{- if eq $redis.mode "sentinel" }}
sentinelMaster: {{ $redis.sentinelService | quote }}
{{- end }}
{{- if $redis.secret }}
{{- with $redis.users.keda.username }}
username: {{ . | quote }}
{{- end }}
{{- end }}
{{- if $redis.tls.enabled }}
enableTLS: "true"
{{- end }}
{{- end -}}

{{/* Whether KEDA needs a TriggerAuthentication. */}}
{{- define "inferq.kedaAuthenticates" -}}
{{- $redis := include "inferq.redis" . | fromJson }}
{{- if or $redis.secret $redis.tls.caSecret.name }}true{{ end }}
{{- end -}}

{{/* A trigger's end: how it logs in. */}}
{{- define "inferq.kedaAuthentication" -}}
{{- if include "inferq.kedaAuthenticates" . }}
authenticationRef:
  name: {{ include "inferq.name" (dict "root" . "suffix" "keda") }}
{{- end }}
{{- end -}}
