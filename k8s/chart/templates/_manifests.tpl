{{/*
What kustomize does with the manifests, as far as they need it. `manifests` has links to the same files: objects by
"kind/namespace/name" are read, patched by the parts that the values select, and written by leasehold.yaml.
*/}}

{{/* The text of a file, with the namespaces of the release. */}}
{{- define "leasehold.text" -}}
{{- $text := required (printf "%s is not in the chart" .path) (.root.Files.Get (printf "manifests/%s" .path)) -}}
{{- $text | replace "leasehold-system" .root.Release.Namespace | replace "leasehold-agents" .root.Values.agentsNamespace -}}
{{- end }}

{{/* Adds the objects of a text to `objects`; all of them get `labels`. */}}
{{- define "leasehold.read" -}}
{{- $clusterWide := list "APIService" "ClusterRole" "ClusterRoleBinding" "CustomResourceDefinition" "DeviceClass" "MutatingWebhookConfiguration" "Namespace" "PriorityClass" "ValidatingAdmissionPolicy" "ValidatingAdmissionPolicyBinding" -}}
{{- range $document := regexSplit "(?m)^---$" .text -1 -}}
{{- $object := fromYaml $document -}}
{{- if hasKey $object "Error" }}{{ fail $object.Error }}{{ end -}}
{{- if $object.kind -}}
{{- if not (or $object.metadata.namespace (has $object.kind $clusterWide)) -}}
{{- $_ := set $object.metadata "namespace" $.root.Release.Namespace -}}
{{- end -}}
{{- range $labelled := concat (list $object (dig "spec" "template" dict $object)) (dig "spec" "volumeClaimTemplates" list $object) -}}
{{- if and $labelled.metadata $.labels -}}
{{- $_ := set $labelled.metadata "labels" (merge (dict) $.labels ($labelled.metadata.labels | default dict)) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $.objects (printf "%s/%s/%s" $object.kind ($object.metadata.namespace | default "") $object.metadata.name) $object -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Merges the second map into the first: null removes, and items of lists are the same if they have the same name. */}}
{{- define "leasehold.merge" -}}
{{- $into := index . 0 -}}
{{- range $key, $new := index . 1 -}}
{{- $old := get $into $key -}}
{{- if kindIs "invalid" $new -}}
{{- $_ := unset $into $key -}}
{{- else if and (kindIs "map" $new) (kindIs "map" $old) -}}
{{- include "leasehold.merge" (list $old $new) -}}
{{- else if and (kindIs "slice" $new) (kindIs "slice" $old) (kindIs "map" (first $new)) (hasKey (first $new | default dict) "name") -}}
{{- $added := list -}}
{{- range $item := $new -}}
{{- $found := false -}}
{{- range $there := $old -}}
{{- if eq $there.name $item.name -}}
{{- $found = true -}}
{{- include "leasehold.merge" (list $there $item) -}}
{{- end -}}
{{- end -}}
{{- if not $found }}{{ $added = append $added $item }}{{ end -}}
{{- end -}}
{{- $_ := set $into $key (concat $old $added) -}}
{{- else -}}
{{- $_ := set $into $key $new -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Adds the resources of a kustomization to `objects`, and patches those that are there. */}}
{{- define "leasehold.kustomize" -}}
{{- $kustomization := include "leasehold.text" (dict "root" .root "path" (printf "%s/kustomization.yaml" .folder)) | fromYaml -}}
{{- range $file := $kustomization.resources -}}
{{- if not (hasPrefix "../" $file) -}}
{{- include "leasehold.read" (dict "root" $.root "objects" $.objects "text" (include "leasehold.text" (dict "root" $.root "path" (printf "%s/%s" $.folder $file)))) -}}
{{- end -}}
{{- end -}}
{{- range $component := $kustomization.components -}}
{{- include "leasehold.kustomize" (dict "root" $.root "objects" $.objects "folder" (printf "webhook/%s" (base $component))) -}}
{{- end -}}
{{- range $patch := $kustomization.patches -}}
{{- $text := $patch.patch | default "" -}}
{{- if $patch.path }}{{ $text = include "leasehold.text" (dict "root" $.root "path" (printf "%s/%s" $.folder $patch.path)) }}{{ end -}}
{{- /* A test of JSON Patch only says that two components exclude each other, as NOTES.txt does. */ -}}
{{- if not (hasPrefix "- {op: test," $text) -}}
{{- range $document := regexSplit "(?m)^---$" $text -1 -}}
{{- $change := fromYaml $document -}}
{{- if hasKey $change "Error" }}{{ fail $change.Error }}{{ end -}}
{{- $target := $patch.target | default (dict "kind" $change.kind "name" $change.metadata.name) -}}
{{- range $key, $object := $.objects -}}
{{- if and (regexMatch (printf "^(%s)$" $target.kind) $object.kind) (regexMatch (printf "^(%s)$" ($target.name | default ".*")) $object.metadata.name) -}}
{{- if hasKey $change "$patch" -}}
{{- $_ := unset $.objects $key -}}
{{- else -}}
{{- include "leasehold.merge" (list $object (omit $change "apiVersion" "kind" "metadata")) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* The labels of an object: those that Kubernetes recommends. */}}
{{- define "leasehold.labels" -}}
app.kubernetes.io/name: {{ .Values.nameOverride | default .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* Sets the values in a workload. */}}
{{- define "leasehold.workload" -}}
{{- $values := .root.Values -}}
{{- $name := .object.metadata.name -}}
{{- $spec := .object.spec -}}
{{- $shared := list "podAnnotations" "podLabels" "extraEnv" -}}
{{- if ne $name "node-agent" -}}
{{- $shared = concat $shared (list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "resources") -}}
{{- end -}}
{{- $own := get $values.components $name | default dict -}}
{{- range $key := $shared -}}
{{- if not (hasKey $own $key) }}{{ $_ := set $own $key (get $values $key) }}{{ end -}}
{{- end -}}
{{- if and (hasKey $spec "replicas") $own.replicas -}}
{{- $_ := set $spec "replicas" $own.replicas -}}
{{- end -}}
{{- $component := dict "app.kubernetes.io/component" $name "app.kubernetes.io/instance" .root.Release.Name -}}
{{- include "leasehold.merge" (list .object.metadata (dict "labels" $component)) -}}
{{- $_ := set $spec.template.metadata "labels" (merge $spec.template.metadata.labels $component ($own.podLabels | default dict)) -}}
{{- with $own.podAnnotations }}{{ include "leasehold.merge" (list $spec.template.metadata (dict "annotations" .)) }}{{ end -}}
{{- range $key := list "affinity" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" -}}
{{- with get $own $key }}{{ $_ := set $spec.template.spec $key . }}{{ end -}}
{{- end -}}
{{- with $own.nodeSelector }}{{ include "leasehold.merge" (list $spec.template.spec (dict "nodeSelector" .)) }}{{ end -}}
{{- with $own.tolerations }}{{ $_ := set $spec.template.spec "tolerations" (concat ($spec.template.spec.tolerations | default list) .) }}{{ end -}}
{{- with $own.resources }}{{ include "leasehold.merge" (list (first $spec.template.spec.containers) (dict "resources" .)) }}{{ end -}}
{{- range $claim := $spec.volumeClaimTemplates -}}
{{- $_ := set $claim.spec.resources.requests "storage" (get $values $name).storage -}}
{{- with (get $values $name).storageClass }}{{ $_ := set $claim.spec "storageClassName" . }}{{ end -}}
{{- end -}}
{{- $pod := $spec.template.spec -}}
{{- with $values.imagePullSecrets }}{{ $_ := set $pod "imagePullSecrets" . }}{{ end -}}
{{- /* Distributions add to the version, such as v1.36.2-gke.100 and v1.36.2+k3s1. */ -}}
{{- $version := regexFind "^v[0-9]+[.][0-9]+[.][0-9]+" .root.Capabilities.KubeVersion.Version -}}
{{- $kubeScheduler := $values.kubeSchedulerImage | default (printf "registry.k8s.io/kube-scheduler:%s" $version) -}}
{{- $images := dict "nats" $values.nats.image "redis" $values.redis.image "kube-scheduler" $kubeScheduler "hami-core" $values.hamiCoreImage -}}
{{- range $container := concat ($pod.initContainers | default list) $pod.containers -}}
{{- if regexMatch "^leasehold(:|$)" $container.image -}}
{{- $_ := set $container "image" (printf "%s:%s" $values.image.repository $values.image.tag) -}}
{{- with $values.image.pullPolicy }}{{ $_ := set $container "imagePullPolicy" . }}{{ end -}}
{{- with $own.extraEnv }}{{ include "leasehold.merge" (list $container (dict "env" .)) }}{{ end -}}
{{- else if hasKey $images $container.name -}}
{{- $_ := set $container "image" (get $images $container.name) -}}
{{- end -}}
{{- /* A change of its settings replaces a pod. */ -}}
{{- range $source := $container.envFrom -}}
{{- $settings := eq $source.configMapRef.name "leasehold-settings" | ternary $values.settings $values.agentSettings -}}
{{- include "leasehold.merge" (list $spec.template.metadata (dict "annotations" (dict "checksum/config" ($settings | toJson | sha256sum)))) -}}
{{- end -}}
{{- end -}}
{{- range $volume := $pod.volumes -}}
{{- if eq (dig "configMap" "name" "" $volume) "kube-scheduler" -}}
{{- $configuration := include "leasehold.text" (dict "root" $.root "path" "components/kube-scheduler/kube-scheduler-configuration.yaml") -}}
{{- include "leasehold.merge" (list $spec.template.metadata (dict "annotations" (dict "checksum/config" ($configuration | sha256sum)))) -}}
{{- end -}}
{{- end -}}
{{- end }}
