{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}
{{/* Names, labels and images, each defined once.

Every name is quoted where it is written: a release or a namespace may be called no, 42 or null. */}}

{{/* Gives each value that is not there its default, for good, unless it may be empty (then it is empty): an upgrade of a
     release of an older chart with --reuse-values brings only what that chart had. Begins every template. */}}
{{- define "edl.complete" -}}
{{- range $key, $default := .Files.Get "files/defaults.json" | fromJson -}}
  {{- $path := splitList "." $key -}}
  {{- $at := $.Values -}}
  {{- range initial $path -}}
    {{- if kindIs "invalid" (index $at .) }}{{ $_ := set $at . dict }}{{ end -}}
    {{- $at = index $at . -}}
  {{- end -}}
  {{- if kindIs "invalid" (index $at (last $path)) }}{{ $_ := set $at (last $path) $default }}{{ end -}}
{{- end -}}
{{- if not (hasKey .Values.storage "claim") }}{{ include "edl.spread" . }}{{ include "edl.decideStorage" . }}{{ end -}}
{{- end -}}

{{/* Gives what applies to all pods to each of them, unless its own section overrides it: a selector or tolerations as a
     whole, labels and annotations by name. */}}
{{- define "edl.spread" -}}
{{- $v := .Values -}}
{{- $global := $v.global | default dict -}}
{{- if not $v.image.registry }}{{ $_ := set $v.image "registry" ($global.imageRegistry | default "") }}{{ end -}}
{{- $secrets := list -}}
{{- range $v.image.pullSecrets | default $v.imagePullSecrets | default ($global.imagePullSecrets | default list) -}}
  {{- $secrets = append $secrets (kindIs "string" . | ternary (dict "name" .) .) -}}
{{- end -}}
{{- $_ := set $v.image "pullSecrets" $secrets -}}
{{- range $pod := list $v.master $v.worker $v.ps -}}
  {{- range $key := list "nodeSelector" "tolerations" -}}
    {{- if not (index $pod $key) }}{{ $_ := set $pod $key (index $v $key) }}{{ end -}}
  {{- end -}}
  {{- range $key := list "podLabels" "podAnnotations" -}}
    {{- $_ := set $pod $key (merge (dict) (index $pod $key | default dict) (index $v $key | default dict)) -}}
  {{- end -}}
{{- end -}}
{{- include "edl.fitWorker" $v.worker -}}
{{- end -}}

{{/* Gives the worker's values what worker.gpus and worker.spot stand for. Its own selector and limit override that. */}}
{{- define "edl.fitWorker" -}}
{{- $tolerations := .tolerations | default list -}}
{{- if gt (int .gpus) 0 -}}
  {{- $limits := dict "limits" (dict "nvidia.com/gpu" (int .gpus)) -}}
  {{- $_ := set . "resources" (merge (dict) (.resources | default dict) $limits) -}}
  {{- $tolerations = append $tolerations (dict "key" "nvidia.com/gpu" "operator" "Exists" "effect" "NoSchedule") -}}
  {{- if not .sharedMemory }}{{ $_ := set . "sharedMemory" "1Gi" }}{{ end -}}
{{- end -}}
{{- $clouds := dict
  "gke" (dict "label" "cloud.google.com/gke-spot" "value" "true" "taint" true "seconds" 15)
  "eks" (dict "label" "eks.amazonaws.com/capacityType" "value" "SPOT" "seconds" 120)
  "aks" (dict "label" "kubernetes.azure.com/scalesetpriority" "value" "spot" "taint" true "seconds" 30)
  "karpenter" (dict "label" "karpenter.sh/capacity-type" "value" "spot" "seconds" 120)
-}}
{{- with get $clouds (.spot | default "") -}}
  {{- $_ := set $ "nodeSelector" (merge (dict) ($.nodeSelector | default dict) (dict .label .value)) -}}
  {{- if .taint }}{{ $tolerations = append $tolerations (dict "key" .label "operator" "Equal" "value" .value "effect" "NoSchedule") }}{{ end -}}
  {{- $_ := set $ "terminationGracePeriodSeconds" (min (int $.terminationGracePeriodSeconds) .seconds) -}}
{{- end -}}
{{- $_ := set . "tolerations" $tolerations -}}
{{- end -}}

{{/* Whether the master has a claim for checkpoints, the trained model and predictions, and which of them it keeps there;
     decided once. Sets storage.claim to its name (empty: none, because of storage.lack), checkpoint.dir and prediction.dir to
     a place on it where no other is set, and storage.results to the address of the results where they have no volume. A run
     that has begun keeps what it has. */}}
{{- define "edl.decideStorage" -}}
{{- $v := .Values -}}
{{- $here := "master://checkpoints" -}}
{{- $there := "master://predictions" -}}
{{- $name := printf "%s-storage" (include "edl.fullname" .) -}}
{{- $trains := not (has $v.mode (list "evaluate" "predict" "horovod")) -}}
{{- $noOutput := not (or $v.output.size $v.output.existingClaim $v.output.hostPath) -}}
{{- $noDir := not (or (ne ($v.checkpoint.dir | default $here) $here) $v.checkpoint.existingClaim $v.checkpoint.hostPath) -}}
{{- $noPredictions := and (eq $v.mode "predict") $noOutput (not (ne ($v.prediction.dir | default $there) $there)) -}}
{{- $reads := hasPrefix "master://" ($v.initFrom.path | default "") -}}
{{- $needed := or (and $trains (or $noOutput $noDir)) $noPredictions $reads -}}
{{- $status := (lookup "v1" "ConfigMap" .Release.Namespace (printf "%s-status" (include "edl.fullname" .)) | default dict).data | default dict -}}
{{- $began := "" -}}
{{- if include "edl.sameRun" (dict "root" . "status" $status) -}}
  {{- $values := $status.values | default "{}" | fromJson -}}
  {{- $kept := list (dig "checkpoint" "dir" "" $values) (dig "prediction" "dir" "" $values) -}}
  {{- $began = or (has $here $kept) (has $there $kept) | ternary "with" "without" -}}
{{- end -}}
{{- $lack := "" -}}
{{- if eq $began "with" -}}
  {{- $needed = true -}}
  {{- if gt (int $v.master.replicas) 1 }}{{ fail "master.replicas: the run keeps its checkpoints on the volume of its only master; set 1, or another runId" }}{{ end -}}
{{- else if not $needed -}}
{{- else if and (eq $began "without") (not $reads) $noDir (not $v.storage.storageClass) -}}
  {{- $lack = "the run has begun without a volume" -}}
{{- else if not $v.storage.size -}}
  {{- $lack = "storage.size is empty" -}}
{{- else if gt (int $v.master.replicas) 1 -}}
  {{- $lack = "of several masters each would need the volume" -}}
{{- else if and (not $v.storage.storageClass) $v.priorityClass.create (not (lookup "v1" "PersistentVolumeClaim" .Release.Namespace $name)) -}}
  {{- /* Without a right in the whole cluster, and where charts are only rendered, the classes are unknown: then there is one. */ -}}
  {{- $classes := lookup "storage.k8s.io/v1" "StorageClass" "" "" -}}
  {{- $default := not $classes -}}
  {{- range $classes.items -}}
    {{- if eq (index (.metadata.annotations | default dict) "storageclass.kubernetes.io/is-default-class" | default "") "true" }}{{ $default = true }}{{ end -}}
  {{- end -}}
  {{- if not $default }}{{ $lack = "this cluster has no default StorageClass: set storage.storageClass" }}{{ end -}}
{{- end -}}
{{- $_ := set $v.storage "claim" "" -}}
{{- $_ := set $v.storage "lack" $lack -}}
{{- $_ := set $v.storage "results" "" -}}
{{- if and $needed (not $lack) -}}
  {{- $_ := set $v.storage "claim" $name -}}
  {{- if and $trains $noOutput }}{{ $_ := set $v.storage "results" "master://" }}{{ end -}}
  {{- if and $trains $noDir }}{{ $_ := set $v.checkpoint "dir" $here }}{{ end -}}
  {{- if $noPredictions }}{{ $_ := set $v.prediction "dir" $there }}{{ end -}}
{{- else if $reads -}}
  {{- fail (printf "initFrom.path: %s is on the master's volume, and it has none: %s" $v.initFrom.path $lack) -}}
{{- end -}}
{{- end -}}

{{/* Not empty if these values request the run that the release has, and not a different run. Takes (dict "root" $ "status" the
     data of the status ConfigMap). */}}
{{- define "edl.sameRun" -}}
{{- $state := .status.state | default "{}" | fromJson -}}
{{- if and $state.runId (eq ($state.requested | default "") (toJson .root.Values.runId | trimAll "\"")) -}}yes{{- end -}}
{{- end -}}

{{/* The keys that differ from the values of the release's run, which the run keeps (files/frozen.json has them all);
     empty without them. The master judges this, too: it also sees what is only rendered. Takes the same. */}}
{{- define "edl.refused" -}}
{{- $refused := list -}}
{{- $began := .status.values | default "{}" | fromJson -}}
{{- if and $began (include "edl.sameRun" .) -}}
  {{- range $key := .root.Files.Get "files/frozen.json" | fromJsonArray -}}
    {{- $old := $began -}}
    {{- $new := $.root.Values -}}
    {{- range splitList "." $key -}}
      {{- if kindIs "map" $old }}{{ $old = index $old . }}{{ end -}}
      {{- $new = index $new . -}}
    {{- end -}}
    {{- if eq $key "model.source" -}}
      {{- /* The text itself is not in the status. */ -}}
      {{- $old = ($.status.state | fromJson).source | default "" -}}
      {{- if $new }}{{ $new = sha256sum $new | trunc 16 }}{{ end -}}
    {{- end -}}
    {{- $same := or (and (empty $old) (empty $new)) (eq (toJson $old) (toJson $new)) -}}
    {{- $decided := and (eq $key "mode") (eq (toString $new) "auto") -}}
    {{- if not (or $same $decided (kindIs "invalid" $old)) }}{{ $refused = append $refused $key }}{{ end -}}
  {{- end -}}
{{- end -}}
{{- join ", " $refused -}}
{{- end -}}

{{- define "edl.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* The name that all objects of the release begin with. At most 40 characters, because `-worker-<n>` follows
     it in a pod's name; what is cut off is replaced by a hash, so that two long names stay different. */}}
{{- define "edl.fullname" -}}
{{- $name := include "edl.name" . -}}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- /* No Service may begin with a digit: the release 42 is edl-42. */ -}}
{{- if regexMatch "^[0-9]" $full }}{{ $full = printf "%s-%s" $name .Release.Name }}{{ end -}}
{{- $full = .Values.fullnameOverride | default $full -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $full) -}}
{{- fail (printf "%q cannot name the release's Service: it may have a-z, 0-9 and '-', and begins with a letter; choose another release name, or set fullnameOverride" $full) -}}
{{- end -}}
{{- if gt (len $full) 40 -}}
{{- printf "%s-%s" ($full | trunc 31 | trimSuffix "-") (sha256sum $full | trunc 8) -}}
{{- else -}}
{{- $full -}}
{{- end -}}
{{- end -}}

{{/* What selects the pods of a component. It never changes: a Deployment's selector cannot.
     Takes (dict "root" $ "component" "master"). */}}
{{- define "edl.selector" -}}
app.kubernetes.io/name: {{ include "edl.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* What selects the pods of a component of one job only: a parent chart can have several jobs in a release, even with
     one nameOverride. Not for Deployments, see above. */}}
{{- define "edl.jobSelector" -}}
{{ include "edl.selector" . }}
edl.dev/job: {{ include "edl.fullname" .root | quote }}
{{- end -}}

{{/* Labels of the pods of a component: not the chart's version, which would restart a master without need.
     Added labels cannot replace those that select the pods. */}}
{{- define "edl.podLabels" -}}
{{- $ours := dict
  "app.kubernetes.io/part-of" "edl"
  "app.kubernetes.io/version" .root.Chart.AppVersion
  "app.kubernetes.io/managed-by" (eq .component "worker" | ternary "edl-master" .root.Release.Service)
-}}
{{- if and .root.Values.queueName (eq .component "worker") }}{{ $_ := set $ours "kueue.x-k8s.io/queue-name" .root.Values.queueName }}{{ end -}}
{{- merge (include "edl.jobSelector" . | fromYaml) $ours ((index .root.Values .component).podLabels | default dict) (.root.Values.commonLabels | default dict) | toYaml -}}
{{- end -}}

{{/* The metadata of an object. Takes (dict "root" $ "component" "master" "suffix" "token"), or instead of the suffix
     "full", a complete name; and "labels", "annotations", and "cluster" for cluster-wide objects. */}}
{{- define "edl.metadata" -}}
name: {{ .full | default (printf "%s-%s" (include "edl.fullname" .root) .suffix) | quote }}
{{- if not .cluster }}
namespace: {{ .root.Release.Namespace | quote }}
{{- end }}
{{- $ours := dict
  "app.kubernetes.io/part-of" "edl"
  "app.kubernetes.io/version" .root.Chart.AppVersion
  "app.kubernetes.io/managed-by" .root.Release.Service
  "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_")
}}
labels:
  {{- merge (include "edl.jobSelector" . | fromYaml) $ours (.labels | default dict) (.root.Values.commonLabels | default dict) | toYaml | nindent 2 }}
{{- with merge (dict) (.annotations | default dict) (.root.Values.commonAnnotations | default dict) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Parameter servers run in the master's. A name that begins with a registry (as Docker tells one: by a dot or a colon in
     its first part, or localhost) is complete: image.registry is for the others. */}}
{{- define "edl.image" -}}
{{- $image := (index .root.Values (eq .component "ps" | ternary "master" .component)).image -}}
{{- $name := $image.repository -}}
{{- $complete := regexMatch "^([^/]*[.:][^/]*|localhost)/" $name -}}
{{- with .root.Values.image.registry }}{{ if not $complete }}{{ $name = printf "%s/%s" (trimSuffix "/" .) $name }}{{ end }}{{ end -}}
{{- if $image.digest -}}
{{ $name }}@{{ $image.digest }}
{{- else -}}
{{ $name }}:{{ $image.tag | default .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* Parameter servers write the same checkpoints as the workers, with the same account. */}}
{{- define "edl.account" -}}
{{- $component := eq .component "ps" | ternary "worker" .component -}}
{{- $account := index .root.Values.serviceAccount $component -}}
{{- if $account.create -}}
{{ $account.name | default (printf "%s-%s" (include "edl.fullname" .root) $component) }}
{{- else -}}
{{ $account.name | default "default" }}
{{- end -}}
{{- end -}}

{{- define "edl.tokenSecret" -}}
{{ .Values.token.existingSecret | default (printf "%s-token" (include "edl.fullname" .)) }}
{{- end -}}

{{/* The token is a file in each pod: a variable would be inherited by all that its processes start, and never change. */}}
{{- define "edl.tokenEnv" -}}
- name: EDL_TOKEN_FILE
  value: {{ printf "/etc/edl/token/%s" .Values.token.key | quote }}
{{- end -}}

{{- define "edl.tokenMount" -}}
- {name: token, mountPath: /etc/edl/token, readOnly: true}
{{- end -}}

{{- define "edl.tokenVolume" -}}
- name: token
  secret: {secretName: {{ include "edl.tokenSecret" . | quote }}}
{{- end -}}

{{/* How a pod that calls the master verifies its certificate; nothing without TLS. */}}
{{- define "edl.tlsEnv" -}}
{{- with .Values.tls.existingSecret -}}
- {name: EDL_TLS_CA, value: /etc/edl/tls/ca.crt}
{{- end -}}
{{- end -}}

{{- define "edl.tlsMount" -}}
{{- with .Values.tls.existingSecret -}}
- {name: edl-tls, mountPath: /etc/edl/tls, readOnly: true}
{{- end -}}
{{- end -}}

{{/* Clients of the master do not see its key. */}}
{{- define "edl.tlsVolume" -}}
{{- with .Values.tls.existingSecret -}}
- name: edl-tls
  secret: {secretName: {{ . | quote }}, items: [{key: ca.crt, path: ca.crt}]}
{{- end -}}
{{- end -}}

{{- define "edl.masterAddress" -}}
{{ include "edl.fullname" . }}-master.{{ .Release.Namespace }}.svc:8500
{{- end -}}

{{/* How many parameter servers the job has, as in edl/contract/modes.py; empty for a job without servers. */}}
{{- define "edl.servers" -}}
{{- $asked := int .Values.ps.servers -}}
{{- if has .Values.mode (list "hybrid" "ps") -}}
{{ $asked | default 2 }}
{{- else if and $asked (has .Values.mode (list "evaluate" "predict")) -}}
{{ $asked }}
{{- end -}}
{{- end -}}

{{/* Something if the job has parameter servers, or may turn out to need some: with mode=auto, unless it is plain. That is a
     script, a text without edl's or ElasticDL's Embedding, or a module of the zoo without one. */}}
{{- define "edl.mayHaveServers" -}}
{{- $model := .Values.model -}}
{{- $plain := has $model.module (list "digits" "counting") -}}
{{- with $model.source }}{{ $plain = not (and (contains "Embedding" .) (regexMatch "\\b(edl|elasticdl)\\b" .)) }}{{ end -}}
{{- with $model.script }}{{ $plain = true }}{{ end -}}
{{- if or (int .Values.ps.servers) (int .Values.ps.replaceEmbeddings) }}{{ $plain = false }}{{ end -}}
{{- if or (include "edl.servers" .) (and (eq .Values.mode "auto") (not $plain)) -}}yes{{- end -}}
{{- end -}}

{{/* Where the parameter server of an index, which stands for {}, is reached; empty for a job without servers. */}}
{{- define "edl.serverAddress" -}}
{{- if include "edl.mayHaveServers" . -}}
{{- $name := printf "%s-ps" (include "edl.fullname" .) -}}
{{ $name }}-{}.{{ $name }}.{{ .Release.Namespace }}.svc:{{ int .Values.ps.port }}
{{- end -}}
{{- end -}}

{{/* The object is cluster-wide, only one release can own it, and it cannot be changed: the hash keeps `vision-edl` in
     `team` apart from `edl` in `team-vision`, and gives another value or policy another object. */}}
{{- define "edl.priorityClass" -}}
{{- $class := .Values.priorityClass -}}
{{- if $class.create -}}
{{- $full := include "edl.fullname" . -}}
{{- $what := printf "%s/%s %d %s" .Release.Namespace $full (int $class.value) $class.preemptionPolicy -}}
{{ $class.name | default (printf "%s-%s-worker-%s" .Release.Namespace $full (sha256sum $what | trunc 8)) }}
{{- else -}}
{{ $class.name }}
{{- end -}}
{{- end -}}

{{/* What a quantity such as 500m or 2Gi amounts to, as a number. */}}
{{- define "edl.amount" -}}
{{- $text := toString . -}}
{{- $unit := regexFind "[a-zA-Z]+$" $text -}}
{{- $units := dict "" 1.0 "n" 1e-9 "u" 1e-6 "m" 1e-3 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18
      "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 -}}
{{- mulf (trimSuffix $unit $text | float64) (get $units $unit) -}}
{{- end -}}

{{/* A value as a literal of CEL. Kubernetes wants all elements of a list and all values of a map to be of one type, which
     dyn() hides. */}}
{{- define "edl.cel" -}}
{{- if kindIs "map" . -}}
dyn({ {{- range $key, $value := . }}{{ if ne $key (keys $ | sortAlpha | first) }}, {{ end }}{{ toJson $key }}: {{ include "edl.cel" $value }}{{ end -}} })
{{- else if kindIs "slice" . -}}
dyn([ {{- range $n, $value := . }}{{ if $n }}, {{ end }}{{ include "edl.cel" $value }}{{ end -}} ])
{{- else -}}
dyn({{ toJson . }})
{{- end -}}
{{- end -}}
