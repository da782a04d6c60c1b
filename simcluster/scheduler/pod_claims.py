"""The PersistentVolumeClaims of a pod: the nodes that they allow, and those not yet bound; pure.

Claims without a StorageClass that exists need nothing of a node, since nothing provisions them.
https://kubernetes.io/docs/concepts/storage/storage-classes/#volume-binding-mode
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from simcluster.apimachinery.objects import Json, at_path, name_of
from simcluster.apimachinery.volumes import (
    NO_PROVISIONER,
    WAIT_FOR_CONSUMER,
    admits_node,
    best_volume,
    is_bound,
    pod_claims,
    selected_node,
    topology_of,
)


@dataclass(frozen=True, slots=True)
class PodClaims:
    """The claims of one pod, with their volumes and classes."""

    missing: tuple[str, ...] = ()
    volumes: tuple[Json, ...] = ()
    """Of claims that are bound."""
    immediate: tuple[Json, ...] = ()
    """Claims that are provisioned without a pod, and not yet bound."""
    waiting: tuple[tuple[Json, Json], ...] = ()
    """Claims that are bound for a pod's node, and not yet bound, each with its class."""
    free: Mapping[str, Json] = field(default_factory=dict)
    """All volumes by name."""

    def refusal(self, node: Json) -> str:
        """Return why the pod cannot run on a node; empty: it can."""
        if self.missing:
            return f'persistentvolumeclaim "{self.missing[0]}" not found'
        if self.immediate:
            return "pod has unbound immediate PersistentVolumeClaims"
        if not all(admits_node(volume, node) for volume in self.volumes):
            return "node(s) didn't match PersistentVolume's node affinity"
        selected = {selected_node(claim) for claim, _ in self.waiting} - {""}
        if not selected <= {name_of(node)}:
            return "node(s) were not the volumes' selected node"
        for claim, storage_class in self.waiting:
            if self.static_volume(claim, node) is None and not _provisions(storage_class, node):
                return "node(s) didn't find available persistent volumes to bind"
        return ""

    def static_volume(self, claim: Json, node: Json) -> Json | None:
        """Return the volume that is there for a claim and a node; or None."""
        return best_volume(claim, self.free.values(), node=node, delayed=True)


def _provisions(storage_class: Json, node: Json) -> bool:
    return storage_class.get("provisioner") != NO_PROVISIONER and topology_of(storage_class, node)


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
        if volume is not None and is_bound(claim):
            bound.append(volume)
        elif kind is not None and kind.get("volumeBindingMode") == WAIT_FOR_CONSUMER:
            waiting.append((claim, kind))
        elif kind is not None:
            immediate.append(claim)
    return PodClaims(tuple(missing), tuple(bound), tuple(immediate), tuple(waiting), volumes)


def _claim_names(pod: Json) -> Iterator[str]:
    return (claim.name for claim in pod_claims(pod))
