{{/* Names, labels and numbers that several templates need. All take the root context unless they say otherwise. */}}

{{- define "hortus.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What the engine's pods run: serve or tulip. */}}
{{- define "hortus.engine" -}}
{{- ternary "serve" "tulip" (eq .Values.mode "single") -}}
{{- end -}}

{{/* The engine's workload: RELEASE-hortus, or RELEASE-hortus-tulip. */}}
{{- define "hortus.engineName" -}}
{{- include "hortus.fullname" . -}}{{- if eq .Values.mode "split" -}}-tulip{{- end -}}
{{- end -}}

{{/* The component that answers HTTP: serve or ivy. */}}
{{- define "hortus.front" -}}
{{- ternary "serve" "ivy" (eq .Values.mode "single") -}}
{{- end -}}

{{/* The front's workload: RELEASE-hortus, or RELEASE-hortus-ivy. */}}
{{- define "hortus.frontName" -}}
{{- include "hortus.fullname" . -}}{{- if eq .Values.mode "split" -}}-ivy{{- end -}}
{{- end -}}

{{/* (root, component) */}}
{{- define "hortus.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* (root, component) */}}
{{- define "hortus.labels" -}}
{{- $root := index . 0 -}}
{{ include "hortus.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Where gateways find schedulers, and the name of Tulip's certificate. */}}
{{- define "hortus.tulipHost" -}}
{{- printf "%s-tulip.%s.svc" (include "hortus.fullname" .) .Release.Namespace -}}
{{- end -}}

{{/* "true" when Ivy and Tulip speak TLS. */}}
{{- define "hortus.tls" -}}
{{- if and (eq .Values.mode "split") .Values.link.tls.ivySecret .Values.link.tls.tulipSecret -}}true{{- end -}}
{{- end -}}

{{/* (root, component). After SIGTERM: the drain time, and ten seconds to send the last answers, close the engine and exit. */}}
{{- define "hortus.grace" -}}
{{- $v := (index . 0).Values -}}
{{- $front := ne (index . 1) "tulip" -}}
{{- add (int $v.drainS) 10 (ternary (int $v.preStopS) 0 $front) -}}
{{- end -}}
