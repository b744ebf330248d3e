{{/* Key patterns of all queues, each with what goes before and behind. Takes queues, before, behind. */}}
{{- define "inferq.keyPatterns" -}}
{{- $patterns := list }}
{{- range .queues }}
{{- $patterns = append $patterns (printf "%sinferq:{%s.*}:%s" $.before . $.behind) }}
{{- end }}
{{- join " " $patterns }}
{{- end -}}

{{/* The rules of a role's user, by what protocol/acl.py says of it. Takes root, role. */}}
{{- define "inferq.aclRules" -}}
{{- $rights := get (.root.Files.Get "files/acl.json" | fromJson) .role }}
{{- $keys := include "inferq.keyPatterns" (dict "queues" (include "inferq.queues" .root | fromJsonArray) "before" "~" "behind" "*") }}
{{- range $rights.prefixes }}
{{- $keys = printf "%s ~%s*" $keys . }}
{{- end }}
{{- printf "resetkeys %s resetchannels -@all" $keys }}
{{- range $rights.commands }} +{{ . }}{{ end }}
{{- end -}}

{{/* KEDA measures lanes, and looks at the delayed jobs by a script of its own. */}}
{{- define "inferq.kedaRules" -}}
{{- $queues := include "inferq.queues" . | fromJsonArray }}
{{- $lanes := include "inferq.keyPatterns" (dict "queues" $queues "before" "%R~" "behind" "jobs:*") }}
{{- $delayed := include "inferq.keyPatterns" (dict "queues" $queues "before" "~" "behind" "delayed") }}
{{- printf "resetkeys %s %s resetchannels -@all" $lanes $delayed }} +auth +hello +ping +select +client|setinfo +client|setname +xlen +eval +type +zcard +llen
{{- end -}}

{{/* Users of the bundled server that have passwords, as a JSON list. */}}
{{- define "inferq.valkeyUsers" -}}
{{- $users := list "worker" "gateway" "keda" "admin" }}
{{- if .Values.tasks.enabled }}
{{- $users = append $users "tasks" }}
{{- end }}
{{- toJson $users }}
{{- end -}}

{{/* The files of the server. */}}
{{- define "inferq.valkeyConfig" -}}
valkey.conf: |
  port 6379
  dir /data
  # every second: what a power cut loses, workers and clients send again
  appendonly yes
  appendfsync everysec
  save ""
  maxmemory {{ .Values.valkey.maxmemory }}
  maxmemory-policy noeviction
  # an event is trimmed and expired with its stream only: small nodes waste the least
  stream-node-max-bytes 1024
  # users below, and a NetworkPolicy, say who may come in
  protected-mode no
  aclfile /run/valkey/users.acl
start.sh: |
  # Writes the users with the Secret's passwords, then becomes the server.
  set -eu
  umask 077
  cat > /run/valkey/users.acl <<USERS
  user default off
  user probe on nopass resetkeys resetchannels -@all +ping
  user admin on >$ADMIN_PASSWORD ~* &* +@all
  user worker on >$WORKER_PASSWORD {{ include "inferq.aclRules" (dict "root" . "role" "worker") }}
  user gateway on >$GATEWAY_PASSWORD {{ include "inferq.aclRules" (dict "root" . "role" "gateway") }}
  {{- if .Values.tasks.enabled }}
  user tasks on >$TASKS_PASSWORD {{ include "inferq.aclRules" (dict "root" . "role" "tasks") }}
  {{- end }}
  user keda on >$KEDA_PASSWORD {{ include "inferq.kedaRules" . }}
  USERS
  exec valkey-server /etc/valkey/valkey.conf
{{- end -}}
