{{/* The parts that every pod shares. */}}

{{/* (root, component). Pod settings up to the containers. */}}
{{- define "hortus.podStart" -}}
{{- $root := index . 0 -}}
{{- $v := $root.Values -}}
{{- $own := ternary $v.ivy $v.engine (eq (index . 1) "ivy") -}}
# A Service named hortus would put HORTUS_PORT=tcp://... into the environment, which Hortus reads as its own setting.
enableServiceLinks: false
automountServiceAccountToken: false
{{- with $v.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
{{- with $v.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
terminationGracePeriodSeconds: {{ include "hortus.grace" . }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "hortus.selector" . | nindent 8 }}
{{- with $own.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* (root, component). Container settings that do not depend on what runs. */}}
{{- define "hortus.containerStart" -}}
{{- $root := index . 0 -}}
{{- $v := $root.Values -}}
{{- $gateway := eq (index . 1) "ivy" -}}
{{- $kind := ternary "gateway" (ternary "cuda" "cpu" (gt (int $v.engine.gpu) 0)) $gateway -}}
{{- $tag := ternary $v.ivy.tag $v.image.tag $gateway -}}
image: {{ printf "%s:%s" $v.image.repository (default (printf "%s-%s" $root.Chart.AppVersion $kind) $tag) | quote }}
imagePullPolicy: {{ $v.image.pullPolicy }}
# Why a start failed is the last line of the log; `kubectl describe pod` then shows it.
terminationMessagePolicy: FallbackToLogsOnError
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{/* (root, component). Environment: secrets (the hub's is not for gateways, which fetch nothing), and extraEnv. */}}
{{- define "hortus.env" -}}
{{- $root := index . 0 -}}
{{- $v := $root.Values -}}
{{- if and (ne (index . 1) "ivy") (eq (int $v.engine.gpu) 0) (not (hasKey (default dict $v.config.rose) "threads")) (dig "requests" "cpu" "" $v.engine.resources) }}
# Without it the engine would start a thread for each core of the node, however few of them it may use.
- name: HORTUS_THREADS
  valueFrom:
    resourceFieldRef: {containerName: hortus, resource: requests.cpu, divisor: "1"}
{{- end }}
{{- range $field, $from := $v.secrets }}
{{- if not (and (eq $field "hub_token") (eq (index $ 1) "ivy")) }}
- name: HORTUS_{{ upper $field }}
  valueFrom:
    secretKeyRef:
      {{- toYaml $from | nindent 6 }}
{{- end }}
{{- end }}
{{- with $v.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* (root, component). */}}
{{- define "hortus.mounts" -}}
{{- $root := index . 0 -}}
- {name: config, mountPath: /etc/hortus/config, readOnly: true}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /cache}
{{- if include "hortus.tls" $root }}
- {name: tls, mountPath: /etc/hortus/tls, readOnly: true}
{{- end }}
{{- with $root.Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* (root, component). A StatefulSet's claim template brings the cache where cache.kind is perPod. */}}
{{- define "hortus.volumes" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $v := $root.Values -}}
- name: config
  configMap:
    name: {{ include "hortus.fullname" $root }}-{{ $component }}
- name: tmp
  emptyDir: {}
{{- if or (eq $component "ivy") (eq $v.cache.kind "emptyDir") }}
- name: cache
  emptyDir: {}
{{- else if eq $v.cache.kind "claim" }}
- name: cache
  persistentVolumeClaim:
    claimName: {{ required "cache.kind claim needs cache.claimName" $v.cache.claimName }}
{{- end }}
{{- if include "hortus.tls" $root }}
- name: tls
  secret:
    secretName: {{ ternary $v.link.tls.ivySecret $v.link.tls.tulipSecret (eq $component "ivy") }}
    defaultMode: 0440
{{- end }}
{{- with $v.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* (root, component). Metadata of the pod template. A changed setting changes the sum, and so rolls the pods. */}}
{{- define "hortus.podMetadata" -}}
{{- $root := index . 0 -}}
{{- $own := ternary $root.Values.ivy $root.Values.engine (eq (index . 1) "ivy") -}}
labels:
  {{- include "hortus.selector" . | nindent 2 }}
annotations:
  hortus/config-sum: {{ include "hortus.toml" . | sha256sum }}
  {{- with $own.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* root. The engine's health, as one probe's action: through the engine, not only to the port. */}}
{{- define "hortus.askEngine" -}}
{{- if eq .Values.mode "single" -}}
httpGet: {path: /ready, port: http}
{{- else if include "hortus.tls" . -}}
exec:
  command:
    - python
    - /etc/hortus/config/probe.py
    - 127.0.0.1:50051
    - {{ include "hortus.tulipHost" . }}
    - hortus.v1.Tulip
    - /etc/hortus/tls
{{- else -}}
grpc: {port: 50051, service: hortus.v1.Tulip}
{{- end -}}
{{- end -}}
