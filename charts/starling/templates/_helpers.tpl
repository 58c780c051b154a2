{{/* Names, labels and images that several templates share. */}}

{{- define "starling.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $base := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- printf "%s-operator" (trunc 43 $base | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- define "starling.selectorLabels" -}}
app.kubernetes.io/name: starling-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "starling.labels" -}}
{{ include "starling.selectorLabels" . }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: starling
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_") }}
{{- end -}}

{{/* The store's master; its name stands in the services' spec.kvCache.store. */}}
{{- define "starling.mooncake" -}}
{{- printf "%s-mooncake" (include "starling.fullname" . | trimSuffix "-operator") -}}
{{- end -}}

{{- define "starling.mooncakeSelectorLabels" -}}
app.kubernetes.io/name: starling-mooncake
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "starling.mooncakeLabels" -}}
{{ include "starling.mooncakeSelectorLabels" . }}
app.kubernetes.io/component: store
app.kubernetes.io/part-of: starling
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_") }}
{{- end -}}

{{- define "starling.serviceAccountName" -}}
{{- if .Values.serviceAccount.name -}}
{{- .Values.serviceAccount.name -}}
{{- else -}}
{{- ternary (include "starling.fullname" .) "default" .Values.serviceAccount.create -}}
{{- end -}}
{{- end -}}

{{/* An image's whole name; called with (dict "image" ... "version" ...). */}}
{{- define "starling.image" -}}
{{- $name := .image.repository -}}
{{- if .image.registry }}{{ $name = printf "%s/%s" .image.registry $name }}{{ end -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $name .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (default .version .image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Rights to bring changes of the Secrets with these names to pods. Without names there is no rule: it would be for all Secrets. */}}
{{- define "starling.apiKeyRules" -}}
- apiGroups: [""]
  resources: [secrets]
  resourceNames: {{ toJson . }}
  verbs: [list]
# For annotations: what a pod runs cannot be changed by its status.
- apiGroups: [""]
  resources: [pods/status]
  verbs: [patch]
{{- end }}
