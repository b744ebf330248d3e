{{/* Beginning of all names. */}}
{{- define "inferq.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- end -}}
{{- end -}}

{{/* A name that Kubernetes takes everywhere. Takes root, suffix. */}}
{{- define "inferq.name" -}}
{{- $name := printf "%s-%s" (include "inferq.fullname" .root) .suffix -}}
{{- if gt (len $name) 63 -}}
{{- fail (printf "The name %s has more than 63 characters: give a shorter fullnameOverride." $name) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/* Labels that tell a component's pods from all others, for good. Takes root, component. */}}
{{- define "inferq.selectorLabels" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Labels of an object. Takes root, component and, of values, labels. */}}
{{- define "inferq.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{ include "inferq.selectorLabels" . }}
{{- include "inferq.givenLabels" . }}
{{- end -}}

{{/* Labels of a component's pods: none that changes with the chart. Takes root, component, labels. */}}
{{- define "inferq.podLabels" -}}
{{ include "inferq.selectorLabels" . }}
{{- include "inferq.givenLabels" . }}
{{- end -}}

{{/* Labels of values, each once: those of an object win over those of all. Takes root, labels. */}}
{{- define "inferq.givenLabels" -}}
{{- with merge (dict) (default dict .labels) (default dict .root.Values.commonLabels) }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* An image's reference. Takes image, version. */}}
{{- define "inferq.image" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (default .version .image.tag) -}}
{{- end -}}
{{- end -}}

{{/* What all pods have in common. */}}
{{- define "inferq.podBasics" -}}
serviceAccountName: {{ include "inferq.serviceAccountName" . | quote }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end -}}

{{/* What all containers have in common. */}}
{{- define "inferq.containerBasics" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
terminationMessagePolicy: FallbackToLogsOnError
{{- end -}}

{{- define "inferq.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "inferq.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Where pods may run. Takes spec (a pool's or component's values) and selector (YAML). */}}
{{- define "inferq.scheduling" -}}
{{- with .spec.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- if .spec.topologySpreadConstraints }}
{{- $selector := dict "labelSelector" (dict "matchLabels" (fromYaml .selector)) }}
topologySpreadConstraints:
  {{- range .spec.topologySpreadConstraints }}
  - {{- toYaml (merge (deepCopy .) $selector) | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}
