"""The PersistentVolumeClaims of a pod: the nodes that they allow, and those not yet bound; pure.

Claims without a StorageClass that exists need nothing of a node, since nothing provisions them.
Ephemeral volumes and `allowedTopologies` are ignored.
https://kubernetes.io/docs/concepts/storage/storage-classes/#volume-binding-mode
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from simcluster.apimachinery.node_selection import node_selected
from simcluster.apimachinery.objects import (
    Json,
    annotations_of,
    at_path,
    labels_of,
    list_at,
    name_of,
)

SELECTED_NODE = "volume.kubernetes.io/selected-node"
WAIT_FOR_CONSUMER = "WaitForFirstConsumer"


@dataclass(frozen=True, slots=True)
class PodClaims:
    """The claims of one pod, with their volumes and classes."""

    missing: tuple[str, ...] = ()
    volumes: tuple[Json, ...] = ()
    """Of claims that are bound."""
    immediate: tuple[Json, ...] = ()
    """Claims that are provisioned without a pod, and not yet bound."""
    waiting: tuple[Json, ...] = ()
    """Claims that are provisioned for a pod's node, and not yet bound."""

    def refusal(self, node: Json) -> str:
        """Return why the pod cannot run on a node; empty: it can."""
        if self.missing:
            return f'persistentvolumeclaim "{self.missing[0]}" not found'
        if self.immediate:
            return "pod has unbound immediate PersistentVolumeClaims"
        if not all(_is_reachable(volume, node) for volume in self.volumes):
            return "node(s) didn't match PersistentVolume's node affinity"
        chosen = {annotations_of(claim).get(SELECTED_NODE) for claim in self.waiting} - {None}
        return "" if chosen <= {name_of(node)} else "node(s) were not the volumes' selected node"


def _is_reachable(volume: Json, node: Json) -> bool:
    required = at_path(volume, "spec.nodeAffinity.required")
    if required is None:
        return True
    affinity = {"requiredDuringSchedulingIgnoredDuringExecution": required}
    spec = {"affinity": {"nodeAffinity": affinity}}
    return node_selected(spec, name_of(node), labels_of(node))


def claims_of(
    pod: Json, claims: Mapping[str, Json], volumes: Mapping[str, Json], kinds: Mapping[str, Json]
) -> PodClaims:
    """Return the claims of a pod, given those of its namespace, all volumes and StorageClasses."""
    missing = []
    bound = []
    immediate = []
    waiting = []
    for name in _claim_names(pod):
        claim = claims.get(name)
        if claim is None:
            missing.append(name)
            continue
        volume = volumes.get(at_path(claim, "spec.volumeName"))
        kind = kinds.get(at_path(claim, "spec.storageClassName"))
        if volume is not None and at_path(claim, "status.phase") == "Bound":
            bound.append(volume)
        elif kind is not None and kind.get("volumeBindingMode") == WAIT_FOR_CONSUMER:
            waiting.append(claim)
        elif kind is not None:
            immediate.append(claim)
    return PodClaims(tuple(missing), tuple(bound), tuple(immediate), tuple(waiting))


def _claim_names(pod: Json) -> Iterator[str]:
    for volume in list_at(pod, "spec.volumes"):
        name = at_path(volume, "persistentVolumeClaim.claimName")
        if name:
            yield str(name)
