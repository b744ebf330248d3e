{{/* A value as text; Helm reads numbers as floats, which would print as 2e+09. */}}
{{- define "inferq.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) -}}
{{- int64 . -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end -}}

{{/* Flags for settings by name: a list's parts and a map's NAME=VALUE are joined by commas. */}}
{{- define "inferq.flags" -}}
{{- range $name, $value := . }}
{{- $flag := replace "_" "-" $name }}
{{- if kindIs "bool" $value }}
- --{{ ternary "" "no-" $value }}{{ $flag }}
{{- else if kindIs "slice" $value }}
- {{ printf "--%s=%s" $flag (join "," $value) | quote }}
{{- else if kindIs "map" $value }}
{{- $pairs := list }}
{{- range $key, $item := $value }}
{{- $pairs = append $pairs (printf "%s=%s" $key $item) }}
{{- end }}
- {{ printf "--%s=%s" $flag (join "," $pairs) | quote }}
{{- else if not (kindIs "invalid" $value) }}
- {{ printf "--%s=%s" $flag (include "inferq.text" $value) | quote }}
{{- end }}
{{- end }}
{{- end -}}
