{{- define "operator.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "operator.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "operator.labels" -}}
{{ include "operator.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: qwen35
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- /* A version may have build metadata, as Flux adds: 0.1.0+abc. Labels may not contain its plus sign. */}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimAll "-_." }}
{{- end }}

{{- define "operator.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "operator.name" .) "default" .Values.serviceAccount.create) }}
{{- end }}
