{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}
{{/* What all pods of edl have in common.

The whole pod as YAML (metadata and spec) of a component. Takes a dict:
  root, component        as everywhere
  container              what is special in its container: command, args, env, ports, probes
  volumes, volumeMounts  beyond what every pod has
  spec                   what is special in the pod's spec
*/}}
{{- define "edl.pod" -}}
{{- $values := index .root.Values .component -}}
metadata:
  labels:
    {{- include "edl.podLabels" . | nindent 4 }}
  {{- with merge (dict) ($values.podAnnotations | default dict) (.root.Values.commonAnnotations | default dict) }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- with .spec }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  serviceAccountName: {{ include "edl.account" . | quote }}
  {{- /* Would set dozens of variables for the namespace's services, which nothing reads. */}}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ int $values.terminationGracePeriodSeconds }}
  {{- with .root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.podSecurityContext }}
  securityContext:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  {{- with $values.schedulerName }}
  schedulerName: {{ . | quote }}
  {{- end }}
  {{- with $values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with concat ($values.tolerations | default list) (include "edl.ownTolerations" $ | fromYamlArray) }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with merge (dict) ($values.affinity | default dict) (include "edl.ownAffinity" $ | fromYaml) }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- $ours := dict "labelSelector" (dict "matchLabels" (include "edl.selector" $ | fromYaml)) }}
    {{- range . }}
    - {{ merge (dict) . $ours | toYaml | nindent 6 | trim }}
    {{- end }}
  {{- end }}
  {{- with $values.initContainers }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .component }}
      image: {{ include "edl.image" . | quote }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      {{- toYaml (omit .container "env" "envFrom") | nindent 6 }}
      env:
        {{- /* The root file system is read-only: /tmp is a home directory that can be written to. */}}
        {{- $env := concat (include "edl.tokenEnv" .root | fromYamlArray) (list (dict "name" "HOME" "value" "/tmp")) .container.env }}
        {{- $said := list }}
        {{- range $values.env }}{{ $said = append $said .name }}{{ end }}
        {{- range $env }}
        {{- if not (has .name $said) }}
        - {{ toYaml . | nindent 10 | trim }}
        {{- end }}
        {{- end }}
        {{- with $values.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with concat (.container.envFrom | default list) ($values.envFrom | default list) }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $values.resources }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $values.securityContext }}
      securityContext:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: output, mountPath: /var/lib/edl}
        {{- include "edl.tokenMount" .root | nindent 8 }}
        {{- range concat .volumeMounts ($values.volumeMounts | default list) }}
        - {{ toYaml . | nindent 10 | trim }}
        {{- end }}
    {{- with $values.extraContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    - {name: tmp, emptyDir: {}}
    {{- include "edl.tokenVolume" .root | nindent 4 }}
    {{- range concat .volumes ($values.volumes | default list) }}
    - {{ toYaml . | nindent 6 | trim }}
    {{- end }}
{{- end -}}

{{/* How long the master stays on a node that is lost, unless its values say it. */}}
{{- define "edl.ownTolerations" -}}
{{- $said := list -}}
{{- range (index .root.Values .component).tolerations }}{{ $said = append $said (.key | default "") }}{{ end -}}
{{- range $taint := list "not-ready" "unreachable" -}}
{{- $key := printf "node.kubernetes.io/%s" $taint -}}
{{- if and (eq $.component "master") (not (has $key $said)) }}
- {key: {{ $key }}, operator: Exists, effect: NoExecute, tolerationSeconds: {{ int $.root.Values.master.unreachableTolerationSeconds }}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Several masters are on several nodes, if that is possible: required, it would keep a rolling update or a cluster of one
     node from having them. A podAntiAffinity of one's own takes its place. */}}
{{- define "edl.ownAffinity" -}}
{{- $values := index .root.Values .component -}}
{{- if and (eq .component "master") (gt (int .root.Values.master.replicas) 1) (not (hasKey ($values.affinity | default dict) "podAntiAffinity")) -}}
podAntiAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            {{- include "edl.jobSelector" . | nindent 12 }}
{{- end -}}
{{- end -}}

{{/* The same, merged with the component's podTemplate. Containers and volumes are merged by name, and within a container
     its environment by name and its mounts by path; other lists are replaced. */}}
{{- define "edl.finishedPod" -}}
{{- $pod := include "edl.pod" . | fromYaml -}}
{{- with $pod.Error }}{{ fail (printf "%s: the rendered pod is invalid: %s" $.component .) }}{{ end -}}
{{- $over := deepCopy ((index .root.Values .component).podTemplate | default dict) -}}
{{- $spec := $over.spec | default dict -}}
{{- range $list := list "containers" "initContainers" "volumes" -}}
  {{- if index $spec $list -}}
    {{- $there := index $pod.spec $list | default list -}}
    {{- $_ := set $spec $list (include "edl.merged" (dict "there" $there "over" (index $spec $list) "key" "name") | fromYamlArray) -}}
  {{- end -}}
{{- end -}}
{{- mergeOverwrite $pod $over | toYaml -}}
{{- end -}}

{{/* A list of maps with a second list laid over it; items with the same `key` are merged. Takes (dict "there" "over" "key"). */}}
{{- define "edl.merged" -}}
{{- $merged := list -}}
{{- $keys := list -}}
{{- range $item := .there -}}
  {{- range $over := $.over -}}
    {{- if eq (index $over $.key) (index $item $.key) -}}
      {{- $over = deepCopy $over -}}
      {{- range $list, $key := dict "env" "name" "volumeMounts" "mountPath" -}}
        {{- if and (index $over $list) (index $item $list) -}}
          {{- $_ := set $over $list (include "edl.merged" (dict "there" (index $item $list) "over" (index $over $list) "key" $key) | fromYamlArray) -}}
        {{- end -}}
      {{- end -}}
      {{- /* A variable has a value or a source, not both: the one that is laid over it counts whole. */ -}}
      {{- $item = or (hasKey $over "value") (hasKey $over "valueFrom") | ternary $over (mergeOverwrite (deepCopy $item) $over) -}}
    {{- end -}}
  {{- end -}}
  {{- $merged = append $merged $item -}}
  {{- $keys = append $keys (index $item $.key) -}}
{{- end -}}
{{- range .over -}}
  {{- if not (has (index . $.key) $keys) -}}{{- $merged = append $merged . -}}{{- end -}}
{{- end -}}
{{- toYaml $merged -}}
{{- end -}}
