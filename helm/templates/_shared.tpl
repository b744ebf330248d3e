{{/* Flags that gateways and tasks have alike, as JSON: batches and traces. */}}
{{- define "inferq.sharedFlags" -}}
{{- $flags := include "inferq.tracingFlags" . | fromJson }}
{{- with .Values.batches }}
{{- if .enabled }}
{{- $_ := set $flags "batch_file_age_s" .fileAgeSeconds }}
{{- if eq .storage "s3" }}
{{- $_ := set $flags "batch_storage" .s3.url }}
{{- if .s3.endpoint }}
{{- $_ := set $flags "batch_storage_endpoint" .s3.endpoint }}
{{- end }}
{{- else }}
{{- $_ := set $flags "batch_storage" "/var/lib/inferq/batches" }}
{{- end }}
{{- end }}
{{- end }}
{{- toJson $flags }}
{{- end -}}

{{/* The flag of traces, if there are any, as JSON. */}}
{{- define "inferq.tracingFlags" -}}
{{- $flags := dict }}
{{- with .Values.tracing.endpoint }}
{{- $_ := set $flags "tracing_endpoint" . }}
{{- end }}
{{- toJson $flags }}
{{- end -}}

{{/* Environment that leads to the files of batches. */}}
{{- define "inferq.batchesEnv" -}}
{{- if and .Values.batches.enabled (eq .Values.batches.storage "s3") }}
{{- with .Values.batches.s3 }}
{{- if .existingSecret }}
{{- $secret := .existingSecret }}
{{- range list "AWS_ACCESS_KEY_ID" "AWS_SECRET_ACCESS_KEY" }}
- name: {{ . }}
  valueFrom:
    secretKeyRef:
      name: {{ $secret | quote }}
      key: {{ . | quote }}
{{- end }}
{{- end }}
{{- with .region }}
- {name: AWS_DEFAULT_REGION, value: {{ . | quote }}}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "inferq.batchesClaim" -}}
{{- default (include "inferq.name" (dict "root" . "suffix" "batches")) .Values.batches.persistentVolumeClaim.existingClaim -}}
{{- end -}}

{{/* The volume with the files of batches, if they are on one. */}}
{{- define "inferq.batchesVolume" -}}
{{- if and .Values.batches.enabled (eq .Values.batches.storage "persistentVolumeClaim") }}
- name: batches
  persistentVolumeClaim:
    claimName: {{ include "inferq.batchesClaim" . | quote }}
{{- end }}
{{- end -}}

{{- define "inferq.batchesVolumeMount" -}}
{{- if and .Values.batches.enabled (eq .Values.batches.storage "persistentVolumeClaim") }}
- {name: batches, mountPath: /var/lib/inferq/batches}
{{- end }}
{{- end -}}

{{/* The port of a URL, whether it names one or not. */}}
{{- define "inferq.portOf" -}}
{{- $host := (urlParse .).host }}
{{- if contains ":" $host -}}
{{- splitList ":" $host | last -}}
{{- else -}}
{{- ternary 443 80 (hasPrefix "https:" .) -}}
{{- end -}}
{{- end -}}
