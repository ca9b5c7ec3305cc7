{{/* Names and labels that the templates share. */}}

{{- define "backstay.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* At most 50 characters, so that a suffix and a pod's own fit into 63. */}}
{{- define "backstay.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "backstay.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Names of objects without a namespace carry the release's, so that two releases do not meet. */}}
{{- define "backstay.clusterName" -}}
{{- if eq .Release.Namespace (include "backstay.fullname" .) -}}
{{- include "backstay.fullname" . -}}
{{- else -}}
{{- printf "%s-%s" .Release.Namespace (include "backstay.fullname" .) -}}
{{- end -}}
{{- end -}}

{{- define "backstay.selectorLabels" -}}
app.kubernetes.io/name: {{ include "backstay.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "backstay.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "backstay.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: backstay
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "backstay.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "backstay.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "backstay.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "backstay.keySecret" -}}
{{- default (printf "%s-key" (include "backstay.fullname" .)) .Values.key.existingSecret -}}
{{- end -}}

{{/* Where the Lease is: two operators that serve one namespace must meet there. */}}
{{- define "backstay.leaseNamespace" -}}
{{- default .Release.Namespace .Values.watchNamespace -}}
{{- end -}}

{{- define "backstay.operatorSubject" -}}
- kind: ServiceAccount
  name: {{ include "backstay.serviceAccountName" . | quote }}
  namespace: {{ .Release.Namespace | quote }}
{{- end -}}
