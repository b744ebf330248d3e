{{/* Where the server is and who logs in, as JSON: the bundled one, or `redis`. */}}
{{- define "inferq.redis" -}}
{{- if .Values.valkey.enabled }}
{{- $name := include "inferq.name" (dict "root" . "suffix" "valkey") }}
{{- $users := dict }}
{{- range list "worker" "gateway" "tasks" "keda" }}
{{- $_ := set $users . (dict "username" . "passwordKey" (printf "%s-password" .)) }}
{{- end }}
{{- dict "mode" "standalone" "addresses" (list (printf "%s:6379" $name)) "database" 0
    "tls" (dict "enabled" false "caSecret" (dict "name" ""))
    "secret" (default $name .Values.valkey.auth.existingSecret) "users" $users
    "sentinelPasswordKey" "" | toJson }}
{{- else }}
{{- with .Values.redis }}
{{- dict "mode" .mode "addresses" .addresses "database" .database "tls" .tls
    "sentinelService" .sentinelService "sentinelPasswordKey" .auth.sentinelPasswordKey
    "secret" .auth.existingSecret "users" (pick .auth "worker" "gateway" "tasks" "keda") | toJson }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The URL of a role; Kubernetes puts the passwords into it. Takes redis, role. */}}
{{- define "inferq.redisUrl" -}}
{{- $scheme := ternary "rediss" "redis" .redis.tls.enabled }}
{{- if ne .redis.mode "standalone" }}
{{- $scheme = printf "%s+%s" $scheme .redis.mode }}
{{- end }}
{{- $login := "" }}
{{- if .redis.secret }}
{{- $login = printf "%s:$(REDIS_PASSWORD)@" (get .redis.users .role).username }}
{{- end }}
{{- $path := "" }}
{{- if eq .redis.mode "standalone" }}
{{- $path = printf "/%d" (int .redis.database) }}
{{- else if eq .redis.mode "sentinel" }}
{{- $path = printf "/%s/%d" .redis.sentinelService (int .redis.database) }}
{{- end }}
{{- $options := list }}
{{- if .redis.tls.caSecret.name }}
{{- $options = append $options "ssl_ca_certs=/etc/inferq/redis-ca/ca.crt" }}
{{- end }}
{{- if .redis.sentinelPasswordKey }}
{{- $options = append $options "sentinel_password=$(SENTINEL_PASSWORD)" }}
{{- end }}
{{- printf "%s://%s%s%s" $scheme $login (join "," .redis.addresses) $path }}
{{- with $options }}?{{ join "&" . }}{{ end }}
{{- end -}}

{{/* Environment that leads to the server. Takes root, role (worker, gateway or tasks). */}}
{{- define "inferq.redisEnv" -}}
{{- $redis := include "inferq.redis" .root | fromJson }}
{{- if $redis.secret }}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ $redis.secret | quote }}
      key: {{ (get $redis.users .role).passwordKey | quote }}
{{- if $redis.sentinelPasswordKey }}
- name: SENTINEL_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ $redis.secret | quote }}
      key: {{ $redis.sentinelPasswordKey | quote }}
{{- end }}
{{- end }}
- name: INFERQ_REDIS_URL
  value: {{ include "inferq.redisUrl" (dict "redis" $redis "role" .role) | quote }}
{{- end -}}

{{/* The volume with the server's authority, if there is one. */}}
{{- define "inferq.redisVolume" -}}
{{- $ca := (include "inferq.redis" . | fromJson).tls.caSecret }}
{{- if $ca.name }}
- name: redis-ca
  secret:
    secretName: {{ $ca.name | quote }}
    items:
      - key: {{ $ca.key | quote }}
        path: ca.crt
{{- end }}
{{- end -}}

{{- define "inferq.redisVolumeMount" -}}
{{- if (include "inferq.redis" . | fromJson).tls.caSecret.name }}
- name: redis-ca
  mountPath: /etc/inferq/redis-ca
  readOnly: true
{{- end }}
{{- end -}}
