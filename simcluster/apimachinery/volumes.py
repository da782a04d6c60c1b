"""PersistentVolumes and the claims that they serve: names, and which volume fits a claim; pure.

https://kubernetes.io/docs/concepts/storage/persistent-volumes/#binding
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from shared.model.quantity import parse_quantity
from simcluster.apimachinery.node_selection import node_selected
from simcluster.apimachinery.objects import (
    Json,
    annotations_of,
    at_path,
    labels_of,
    list_at,
    metadata,
    name_of,
    namespace_of,
)
from simcluster.apimachinery.selectors import selector_requirements

CLAIMS = "persistentvolumeclaims"
VOLUMES = "persistentvolumes"
CLASSES = "storageclasses"
SELECTED_NODE = "volume.kubernetes.io/selected-node"
BIND_COMPLETED = "pv.kubernetes.io/bind-completed"
BOUND_BY_CONTROLLER = "pv.kubernetes.io/bound-by-controller"
WAIT_FOR_CONSUMER = "WaitForFirstConsumer"
NO_PROVISIONER = "kubernetes.io/no-provisioner"


@dataclass(frozen=True, slots=True)
class PodClaim:
    """A claim of a pod: one that the pod names, or that is made for one of its volumes."""

    name: str
    template: Json | None = None
    """`volumeClaimTemplate` of a generic ephemeral volume; or None."""


def pod_claims(pod: Json) -> Iterator[PodClaim]:
    for volume in list_at(pod, "spec.volumes"):
        if name := at_path(volume, "persistentVolumeClaim.claimName"):
            yield PodClaim(str(name))
        elif template := at_path(volume, "ephemeral.volumeClaimTemplate"):
            yield PodClaim(f"{name_of(pod)}-{volume['name']}", template)


def is_bound(claim: Json) -> bool:
    return bool(at_path(claim, "status.phase") == "Bound")


def selected_node(claim: Json) -> str:
    return annotations_of(claim).get(SELECTED_NODE, "")


def reference_to(claim: Json) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "namespace": namespace_of(claim),
        "name": name_of(claim),
        "uid": claim["metadata"]["uid"],
    }


def refers_to(reference: Json | None, claim: Json) -> bool:
    """Return whether a `claimRef` is of this claim; one without a UID waits for its name."""
    if not reference:
        return False
    names = (reference.get("namespace"), reference.get("name"))
    uids = {None, "", claim["metadata"]["uid"]}
    is_named = names == (namespace_of(claim), name_of(claim))
    return is_named and reference.get("uid") in uids


def admits_node(volume: Json, node: Json) -> bool:
    """Return whether a volume can be reached from a node."""
    required = at_path(volume, "spec.nodeAffinity.required")
    if required is None:
        return True
    affinity = {"requiredDuringSchedulingIgnoredDuringExecution": required}
    spec = {"affinity": {"nodeAffinity": affinity}}
    return node_selected(spec, name_of(node), labels_of(node))


def topology_of(storage_class: Json, node: Json) -> bool:
    """Return whether the class provisions volumes for a node."""
    terms = storage_class.get("allowedTopologies") or ()
    labels = labels_of(node)
    return not terms or any(
        all(
            labels.get(expression["key"]) in expression.get("values", ())
            for expression in term.get("matchLabelExpressions") or ()
        )
        for term in terms
    )


def best_volume(
    claim: Json, volumes: Iterable[Json], *, node: Json | None = None, delayed: bool = False
) -> Json | None:
    """Return the volume that is reserved for a claim, or else the smallest free one that fits.

    With a `node`, the volume can be reached from it. A claim whose binding is `delayed` gets a free
    volume for a node only.
    """
    fitting = [volume for volume in volumes if _fits(claim, volume, node)]
    for volume in fitting:
        if refers_to(at_path(volume, "spec.claimRef"), claim):
            return volume
    if delayed and node is None:
        return None
    free = [volume for volume in fitting if _is_free(claim, volume)]
    return min(free, key=lambda volume: (_size(volume, "capacity"), name_of(volume)), default=None)


def _fits(claim: Json, volume: Json, node: Json | None) -> bool:
    modes = {at_path(obj, "spec.volumeMode") or "Filesystem" for obj in (claim, volume)}
    return (
        len(modes) == 1
        and "deletionTimestamp" not in metadata(volume)
        and _size(volume, "capacity") >= _size(claim, "resources.requests")
        and (node is None or admits_node(volume, node))
    )


def _is_free(claim: Json, volume: Json) -> bool:
    selector = at_path(claim, "spec.selector")
    wanted = set(list_at(claim, "spec.accessModes"))
    return (
        at_path(volume, "spec.claimRef") is None
        and at_path(volume, "status.phase") == "Available"
        and (at_path(volume, "spec.storageClassName") or "")
        == (at_path(claim, "spec.storageClassName") or "")
        and wanted <= set(list_at(volume, "spec.accessModes"))
        and all(holds(labels_of(volume)) for holds in selector_requirements(selector or {}))
    )


def _size(obj: Json, path: str) -> Fraction:
    return parse_quantity(at_path(obj, f"spec.{path}.storage") or 0)
