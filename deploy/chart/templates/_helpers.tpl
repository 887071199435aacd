{{/* The name of the release's resources: its own, with kvern in it. */}}
{{- define "kvern.name" -}}
{{- if contains "kvern" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}{{ printf "%s-kvern" (.Release.Name | trunc 44 | trimSuffix "-") }}{{ end }}
{{- end }}

{{- define "kvern.selector" -}}
app.kubernetes.io/name: kvern
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvern.labels" -}}
{{ include "kvern.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "kvern.keysSecret" -}}
{{- if and .Values.apiKeys.existingSecret .Values.apiKeys.content }}
{{- fail "apiKeys.existingSecret and apiKeys.content are both given: leave one out" }}
{{- end }}
{{- if not (or .Values.apiKeys.existingSecret .Values.apiKeys.content) }}
{{- fail "there are no API keys: give --set-file apiKeys.content=FILE, or apiKeys.existingSecret, a secret whose key api-keys is the file" }}
{{- end }}
{{- .Values.apiKeys.existingSecret | default (printf "%s-api-keys" (include "kvern.name" .)) }}
{{- end }}
