{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}
{{/* The whole worker Pod; the master only adds which worker it is. Takes (dict "root" $ "priorityClass" "name"). */}}
{{- define "edl.workerPod" -}}
{{- $v := .root.Values -}}
{{- $volumes := list (include "edl.outputVolume" .root | fromYaml) -}}
{{- $mounts := list -}}
{{- range $kind := list "data" "model" -}}
  {{- $place := index $v $kind -}}
  {{- with include "edl.place" $place -}}
    {{- $volumes = append $volumes (merge (dict "name" $kind) (fromYaml .)) -}}
    {{- $mounts = append $mounts (dict "name" $kind "mountPath" $place.mountPath "readOnly" true) -}}
  {{- end -}}
{{- end -}}
{{- with include "edl.place" $v.checkpoint -}}
  {{- $volumes = append $volumes (merge (dict "name" "checkpoints") (fromYaml .)) -}}
  {{- $mounts = append $mounts (dict "name" "checkpoints" "mountPath" $v.checkpoint.dir) -}}
{{- end -}}
{{- with $v.worker.sharedMemory -}}
  {{- $volumes = append $volumes (dict "name" "shm" "emptyDir" (dict "medium" "Memory" "sizeLimit" .)) -}}
  {{- $mounts = append $mounts (dict "name" "shm" "mountPath" "/dev/shm") -}}
{{- end -}}
{{- /* The ring uses the pod's own network. TensorFlow sees all CPUs of the node, and without this variable it would
       start as many threads even if a limit lets it run on one. */ -}}
{{- $env := list
  (dict "name" "EDL_MASTER" "value" (include "edl.masterAddress" .root))
  (dict "name" "EDL_RING_INTERFACE" "value" "eth0")
  (dict "name" "TF_NUM_INTRAOP_THREADS" "valueFrom" (dict "resourceFieldRef" (dict "resource" "limits.cpu")))
  (dict "name" "POD_NAME" "valueFrom" (dict "fieldRef" (dict "fieldPath" "metadata.name")))
-}}
{{- with $v.storage.results }}{{ $env = append $env (dict "name" "EDL_RESULTS" "value" .) }}{{ end -}}
{{- $env = concat $env (include "edl.tlsEnv" .root | fromYamlArray) -}}
{{- $mounts = concat $mounts (include "edl.tlsMount" .root | fromYamlArray) -}}
{{- $volumes = concat $volumes (include "edl.tlsVolume" .root | fromYamlArray) -}}
{{- $program := $v.elastic.prefork | ternary "edl.trainer.supervisor" "edl.trainer" -}}
{{- $container := dict "command" (list "python" "-P" "-m" $program) "env" $env -}}
{{- with $v.checkpoint.existingSecret -}}
  {{- $_ := set $container "envFrom" (list (dict "secretRef" (dict "name" .))) -}}
{{- end -}}
{{- $spec := dict "restartPolicy" "Never" "automountServiceAccountToken" false -}}
{{- with .priorityClass }}{{ $_ := set $spec "priorityClassName" . }}{{ end -}}
apiVersion: v1
kind: Pod
{{ include "edl.finishedPod" (dict "root" .root "component" "worker" "container" $container "volumes" $volumes "volumeMounts" $mounts "spec" $spec) }}
{{- end -}}

{{/* A claim or a directory of the nodes as a volume; nothing if neither is set. */}}
{{- define "edl.place" -}}
{{- if .existingClaim -}}
persistentVolumeClaim: {claimName: {{ .existingClaim | quote }}}
{{- else if .hostPath -}}
hostPath: {path: {{ .hostPath | quote }}}
{{- end -}}
{{- end -}}

{{- define "edl.outputVolume" -}}
name: output
{{ if and .Values.output.size (not .Values.output.existingClaim) -}}
persistentVolumeClaim: {claimName: {{ printf "%s-output" (include "edl.fullname" .) | quote }}}
{{- else -}}
{{ include "edl.place" .Values.output | default "emptyDir: {}" }}
{{- end }}
{{- end -}}
