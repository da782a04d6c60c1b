"""What the placer makes of each field of a pod; pure.

A path without a row has the row of the nearest field above it, unless that is OBEYED.
kube-scheduler places a pod with a field that is handed over, where the extender is installed; else
it is denied.
https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Effect(StrEnum):
    OBEYED = "obeyed"
    NO_EFFECT = "no effect"
    PREFERENCE = "not weighed"
    HANDED_OVER = "handed over"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodField:
    path: str
    effect: Effect
    reason: str = ""
    """Its label's value."""
    note: str = ""
    when: Mapping[str, object] = field(default_factory=dict)
    """Values that the object with the field, or the item of the list, has."""

    @property
    def text(self) -> str:
        values = (f"{key}: {str(value).lower() if isinstance(value, bool) else value}"
                  for key, value in self.when.items())  # fmt: skip
        return f"{self.path} ({', '.join(values)})" if self.when else self.path


@dataclass(frozen=True, slots=True)
class FoundField:
    path: str
    """Such as `spec.volumes[1].persistentVolumeClaim`."""
    row: PodField


def handed_over(pod: Mapping[str, object]) -> Iterator[FoundField]:
    """Yield the fields of a pod's JSON that the placer does not support."""
    for row in _HANDED_OVER:
        for path in _find(pod, row.path.split("."), "", row.when):
            yield FoundField(path, row)


def _find(
    value_above: object, segments: list[str], path: str, when: Mapping[str, object]
) -> Iterator[str]:
    """Empty values count as not set."""
    if not isinstance(value_above, Mapping):
        return
    name = segments[0].removesuffix("[]")
    is_list = segments[0].endswith("[]")
    value = value_above.get(name)
    below = segments[1:]
    path = f"{path}.{name}" if path else name
    items = [(path, value)]
    if is_list:
        listed = value if isinstance(value, list | tuple) else ()
        items = [(f"{path}[{number}]", item) for number, item in enumerate(listed)]
    for place, item in items:
        if below:
            yield from _find(item, below, place, when)
        elif when:
            if _has_values(item if is_list else value_above, when):
                yield place
        elif item:
            yield place


def _has_values(item: object, values: Mapping[str, object]) -> bool:
    return isinstance(item, Mapping) and all(
        item.get(key) == value for key, value in values.items()
    )


def _all(
    effect: Effect, above: str, names: str, *, reason: str = "", note: str = ""
) -> list[PodField]:
    """`names` are separated by spaces."""
    return [
        PodField(path=f"{above}.{name}", effect=effect, reason=reason, note=note)
        for name in names.split()
    ]


OBEYED = Effect.OBEYED
NO_EFFECT = Effect.NO_EFFECT
PREFERENCE = Effect.PREFERENCE
HANDED_OVER = Effect.HANDED_OVER


def _container_fields(containers: str) -> list[PodField]:
    of = f"spec.{containers}"
    return [
        *_all(NO_EFFECT, of,
              "args command env envFrom imagePullPolicy lifecycle livenessProbe name "
              "readinessProbe resizePolicy securityContext startupProbe stdin stdinOnce "
              "terminationMessagePath terminationMessagePolicy tty volumeDevices volumeMounts "
              "workingDir ports[].containerPort ports[].name "
              "resources.claims restartPolicyRules[]"),
        *_all(OBEYED, of, "resources.limits resources.requests"),
        *_all(PREFERENCE, of, "image", note="nodes that have the image"),
        *_all(OBEYED, of, "ports[].hostIP ports[].protocol"),
        *_all(OBEYED, of, "ports[].hostPort",
              note="set by the API server for all ports of pods with `hostNetwork`"),
        PodField(path=f"{of}.restartPolicyRules[]", effect=HANDED_OVER, reason="node-features",
                 when={"action": "RestartAllContainers"}),
    ]  # fmt: skip


_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
_TERM = " ".join(
    f"{{0}}.{kind}[].{name}"
    for kind in ("matchExpressions", "matchFields")
    for name in ("key", "operator", "values")
)
_SELECTOR = "{0}.matchLabels " + " ".join(
    f"{{0}}.matchExpressions[].{name}" for name in ("key", "operator", "values")
)
_AFFINITY_TERM = (
    f"{_SELECTOR.format('labelSelector')} {_SELECTOR.format('namespaceSelector')} "
    "matchLabelKeys mismatchLabelKeys namespaces topologyKey"
)
_WEIGHTED = f"weight {' '.join(f'podAffinityTerm.{name}' for name in _AFFINITY_TERM.split())}"

FIELDS = (
    *_all(OBEYED, "metadata", "annotations deletionTimestamp"),
    *_all(OBEYED, "metadata", "labels namespace",
          note="rules of other pods select by them"),
    *_all(NO_EFFECT, "metadata",
          "creationTimestamp deletionGracePeriodSeconds finalizers generateName generation "
          "managedFields name ownerReferences resourceVersion selfLink uid"),
    *_all(OBEYED, "spec",
          "nodeSelector overhead preemptionPolicy priority resources.requests schedulerName "
          "schedulingGates[].name tolerations[].effect tolerations[].key tolerations[].operator "
          "tolerations[].value"),
    *_all(OBEYED, "spec", "schedulingGroup.podGroupName", note="a gang of its PodGroup"),
    *_all(OBEYED, "spec", "nodeName", note="denied in pods with GPUs"),
    *_all(NO_EFFECT, "spec",
          "activeDeadlineSeconds automountServiceAccountToken dnsConfig dnsPolicy "
          "enableServiceLinks ephemeralContainers hostAliases hostIPC hostNetwork hostPID "
          "hostUsers hostname hostnameOverride imagePullSecrets os readinessGates resources.claims "
          "resources.limits restartPolicy securityContext serviceAccount serviceAccountName "
          "setHostnameAsFQDN shareProcessNamespace subdomain terminationGracePeriodSeconds "
          "tolerations[].tolerationSeconds"),
    *_all(NO_EFFECT, "spec", "priorityClassName", note="the API server writes its `priority`"),
    *_all(NO_EFFECT, "spec", "runtimeClassName",
          note="the API server writes its `overhead`, `nodeSelector` and `tolerations`"),
    *_container_fields("containers[]"),
    *_container_fields("initContainers[]"),
    *_all(NO_EFFECT, "spec", "containers[].restartPolicy"),
    *_all(OBEYED, "spec", "initContainers[].restartPolicy"),
    *_all(OBEYED, f"spec.affinity.nodeAffinity.{_REQUIRED}", _TERM.format("nodeSelectorTerms[]")),
    *_all(OBEYED, f"spec.affinity.nodeAffinity.{_PREFERRED}[]",
          f"weight {_TERM.format('preference')}"),
    *_all(OBEYED, f"spec.affinity.podAffinity.{_REQUIRED}[]", _AFFINITY_TERM),
    *_all(OBEYED, f"spec.affinity.podAntiAffinity.{_REQUIRED}[]", _AFFINITY_TERM,
          note="also that of running pods, and of pods with GPUs that are being bound"),
    *_all(OBEYED, f"spec.affinity.podAffinity.{_PREFERRED}[]", _WEIGHTED),
    *_all(OBEYED, f"spec.affinity.podAntiAffinity.{_PREFERRED}[]", _WEIGHTED),
    *_all(OBEYED, "spec.topologySpreadConstraints[]",
          f"{_SELECTOR.format('labelSelector')} matchLabelKeys maxSkew minDomains "
          "nodeAffinityPolicy nodeTaintsPolicy topologyKey whenUnsatisfiable"),
    PodField(path="spec.hostUsers", effect=HANDED_OVER, reason="node-features",
             when={"hostUsers": False, "hostNetwork": True}),
    *_all(HANDED_OVER, "spec", "resourceClaims[]", reason="resource-claims"),
    *_all(OBEYED, "spec.volumes[]", "persistentVolumeClaim.claimName"),
    *_all(NO_EFFECT, "spec.volumes[]", "persistentVolumeClaim.readOnly"),
    *_all(NO_EFFECT, "spec.volumes[]", "ephemeral",
          note="the PersistentVolumeClaim that is made from it is obeyed"),
    *_all(HANDED_OVER, "spec.volumes[]",
          "awsElasticBlockStore azureDisk azureFile cinder gcePersistentDisk iscsi portworxVolume "
          "rbd vsphereVolume",
          reason="volumes", note="a disk is attached to one node, or nodes have a limit of them"),
    *_all(NO_EFFECT, "spec.volumes[]",
          "cephfs configMap csi downwardAPI emptyDir fc flexVolume flocker gitRepo glusterfs "
          "hostPath image name nfs photonPersistentDisk projected quobyte scaleIO secret "
          "storageos"),
)  # fmt: skip

_HANDED_OVER = tuple(row for row in FIELDS if row.effect is HANDED_OVER)
