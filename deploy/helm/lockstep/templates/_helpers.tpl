{{- define "lockstep.image" -}}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ .tag }}{{ end }}
{{- end }}

{{- define "lockstep.labels" -}}
app.kubernetes.io/part-of: lockstep
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "lockstep.selector" -}}
app.kubernetes.io/name: lockstep-{{ .part }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end }}

{{- define "lockstep.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "lockstep.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "lockstep.claim" -}}
{{ .Values.weights.existingClaim | default (printf "%s-weights" .Release.Name) }}
{{- end }}

{{- define "lockstep.store" -}}
{{- if .Values.secrets.store }}{{ .Values.secrets.store }}
{{- else }}postgresql://lockstep:{{ required "set postgres.password or secrets.store" .Values.postgres.password }}@{{ .Release.Name }}-postgres:5432/lockstep{{ end }}
{{- end }}
