{{/*
(root, component). The TOML file of one component: values.config, and what the chart decides.
JSON's numbers, booleans and strings are TOML's too.
*/}}
{{- define "hortus.toml" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $v := $root.Values -}}
{{- $config := deepCopy $v.config -}}
{{- range list "ivy" "tulip" "rose" "link" -}}
{{- $_ := set $config . (default dict (get $config .)) -}}
{{- end -}}
{{- $host := default "0.0.0.0" $config.ivy.host -}}
{{- $ivy := dict "host" $host "port" 8080 "drain_s" $v.drainS -}}
{{- $link := dict "metrics_port" 9090 -}}
{{- /* Said outright: a GPU pod without a working driver must fail at start, not serve from its CPU. */ -}}
{{- if not (hasKey $config.rose "device") -}}
{{- $_ := set $config.rose "device" (ternary "cuda" "cpu" (gt (int $v.engine.gpu) 0)) -}}
{{- end -}}
{{- if eq $component "tulip" -}}
{{- $_ := set $link "listen" (printf (ternary "[%s]:50051" "%s:50051" (contains ":" $host)) $host) -}}
{{- else if eq $component "ivy" -}}
{{- $_ := set $link "replica" (printf "%s:50051" (include "hortus.tulipHost" $root)) -}}
{{- end -}}
{{- if include "hortus.tls" $root -}}
{{- $_ := mergeOverwrite $link (dict "link_ca" "/etc/hortus/tls/ca.crt" "link_cert" "/etc/hortus/tls/tls.crt" "link_key" "/etc/hortus/tls/tls.key") -}}
{{- end -}}
{{- $_ := mergeOverwrite $config (dict "ivy" $ivy "link" $link) -}}
{{- range $section := list "ivy" "tulip" "rose" "link" }}
[{{ $section }}]
{{- range $name, $value := get $config $section }}
{{- if not (kindIs "invalid" $value) }}
{{ $name }} = {{ toRawJson $value }}
{{- end }}
{{- end }}
{{ end -}}
{{- end -}}
