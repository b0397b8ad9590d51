{{- define "waffle.name" -}}
{{ printf "%s-%s" .Release.Name .Values.role | trunc 52 | trimSuffix "-" }}
{{- end }}

{{- define "waffle.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: {{ .Values.role }}
{{- end }}

{{- define "waffle.labels" -}}
{{ include "waffle.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "waffle.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{- define "waffle.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "waffle.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
shareProcessNamespace: true  # the pause process reaps Flower's child processes
terminationGracePeriodSeconds: {{ .Values.terminationGracePeriodSeconds }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .Values.keys.existingSecret }}
initContainers:
  - name: keys
    image: {{ include "waffle.image" . | quote }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    # A mounted Secret belongs to root; the service needs files that only it can read.
    command: ["sh", "-c", "umask 077 && cp -L /secret/* /keys/"]
    securityContext:
      {{- include "waffle.containerSecurity" . | nindent 6 }}
    resources:
      requests: {cpu: 10m, memory: 16Mi}
      limits: {memory: 64Mi}
    volumeMounts:
      - {name: secret, mountPath: /secret, readOnly: true}
      - {name: keys, mountPath: /keys}
{{- end }}
containers:
  - name: {{ .Values.role }}
    image: {{ include "waffle.image" . | quote }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    args: [deploy, {{ .Values.role }}, /var/lib/waffle]
    securityContext:
      {{- include "waffle.containerSecurity" . | nindent 6 }}
    resources:
      {{- toYaml .Values.resources | nindent 6 }}
    {{- if eq .Values.role "server" }}
    ports:
      - {name: fleet, containerPort: {{ .Values.service.port }}, protocol: TCP}
    startupProbe:
      tcpSocket: {port: fleet}
      periodSeconds: 5
      failureThreshold: 60
    readinessProbe:
      tcpSocket: {port: fleet}
      periodSeconds: 10
    livenessProbe:
      tcpSocket: {port: fleet}
      periodSeconds: 30
      failureThreshold: 4
    {{- end }}
    volumeMounts:
      - {name: folder, mountPath: /var/lib/waffle}
      - {name: tmp, mountPath: /tmp}
      {{- if .Values.settings }}
      - {name: settings, mountPath: /var/lib/waffle/{{ .Values.role }}.toml, subPath: {{ .Values.role }}.toml, readOnly: true}
      {{- end }}
      {{- if .Values.keys.existingSecret }}
      {{- if eq .Values.role "server" }}
      - {name: keys, mountPath: /var/lib/waffle/keys}  # the server adds its own secrets, new at each start
      {{- else }}
      {{- range .Values.keys.files }}
      - {name: keys, mountPath: /var/lib/waffle/{{ . }}, subPath: {{ . }}, readOnly: true}
      {{- end }}
      {{- end }}
      {{- end }}
      {{- if and (eq .Values.role "site") .Values.data.existingClaim }}
      - {name: data, mountPath: /var/lib/waffle/data, readOnly: true}
      {{- end }}
volumes:
  - name: tmp
    emptyDir: {sizeLimit: 256Mi}
  {{- if .Values.persistence.existingClaim }}
  - name: folder
    persistentVolumeClaim: {claimName: {{ .Values.persistence.existingClaim }}}
  {{- end }}
  {{- if .Values.settings }}
  - name: settings
    configMap: {name: {{ include "waffle.name" . }}}
  {{- end }}
  {{- if .Values.keys.existingSecret }}
  - name: secret
    secret: {secretName: {{ .Values.keys.existingSecret }}, defaultMode: 0440}
  - name: keys
    emptyDir: {medium: Memory, sizeLimit: 1Mi}
  {{- end }}
  {{- if and (eq .Values.role "site") .Values.data.existingClaim }}
  - name: data
    persistentVolumeClaim: {claimName: {{ .Values.data.existingClaim }}, readOnly: true}
  {{- end }}
{{- end }}
