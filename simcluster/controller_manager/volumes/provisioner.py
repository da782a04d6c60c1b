"""Provisions volumes for claims; parameters of a StorageClass say how slowly, and where it fails.

`delay` is in seconds. `fails-on` has names of nodes, with commas between them, or `*` for all: a
volume for them is refused for lack of space, and another node has to be selected, as with
external-provisioner.
"""

import time
from typing import Any

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
from simcluster.apimachinery.volumes import (
    CLAIMS,
    CLASSES,
    SELECTED_NODE,
    VOLUMES,
    WAIT_FOR_CONSUMER,
    reference_to,
    selected_node,
    topology_of,
)
from simcluster.controller_manager.volumes.binding import (
    CLAIM,
    PROVISIONED_BY,
    STORAGE_PROVISIONER,
)
from simcluster.events import EventRecorder
from simcluster.ports import ClusterStore

RETRY_S = 1.0
"""Pause before another attempt for a claim that is not provisioned for a node."""
ZONE = "topology.kubernetes.io/zone"
HOSTNAME = "kubernetes.io/hostname"
DEFAULT_CLASS = "standard"
SHARED_MODES = {"ReadWriteMany", "ReadOnlyMany"}


def create_default_class(store: ClusterStore) -> None:
    """Create a default StorageClass, unless there is one of its name."""
    if store.find(CLASSES, None, DEFAULT_CLASS) is None:
        default = {
            "metadata": {
                "name": DEFAULT_CLASS,
                "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
            },
            "provisioner": "simulated.example",
            "volumeBindingMode": WAIT_FOR_CONSUMER,
        }
        store.create(CLASSES, default)


class Provisioner:
    """Plays the part of external-provisioner, for the provisioners of all StorageClasses."""

    def __init__(self, store: ClusterStore, events: EventRecorder) -> None:
        self._store = store
        self._events = events
        self._due: dict[tuple[str, str], float] = {}
        """When a volume is there, by UID of the claim and selected node."""

    def sync(self) -> float | None:
        """Make the volumes that are due; return after how many seconds the next one is, or None."""
        waiting: dict[tuple[str, str], float] = {}
        for claim in self._store.list(CLAIMS):
            storage_class = self._class(claim)
            node = selected_node(claim)
            delayed = storage_class.get("volumeBindingMode") == WAIT_FOR_CONSUMER
            if not storage_class or (delayed and not node):
                continue
            key = (claim["metadata"]["uid"], node)
            due = self._due.get(key, time.monotonic() + _delay_s(storage_class))
            if due > time.monotonic():
                waiting[key] = due
            elif not self._provision(claim, storage_class, node if delayed else None):
                waiting[key] = time.monotonic() + RETRY_S
        self._due = waiting
        return max(min(waiting.values()) - time.monotonic(), 0.0) if waiting else None

    def _class(self, claim: Json) -> Json:
        """Return the class of a claim whose volume has to be made, or else an empty map."""
        provisioner = annotations_of(claim).get(STORAGE_PROVISIONER)
        is_marked = "deletionTimestamp" in metadata(claim)
        if not provisioner or is_marked or at_path(claim, "spec.volumeName"):
            return {}
        volume = self._store.find(VOLUMES, None, _volume_name(claim))
        name = str(at_path(claim, "spec.storageClassName"))
        record = self._store.find(CLASSES, None, name)
        return record.obj if record and volume is None else {}

    def _provision(self, claim: Json, storage_class: Json, node_name: str | None) -> bool:
        """Make a volume, for a node if one is selected; return whether it need not be repeated."""
        node: Json | None = None
        if node_name is not None:
            record = self._store.find("nodes", None, node_name)
            node = record.obj if record else None
            refusal = _refusal(storage_class, node) if node else f'node "{node_name}" not found'
        else:
            refusal = _refusal(storage_class, {})
        if refusal:
            text = (
                f'failed to provision volume with StorageClass "{name_of(storage_class)}": '
                f"rpc error: code = ResourceExhausted desc = {refusal}"
            )
            self._events.write(claim, CLAIM, "Warning", "ProvisioningFailed", text)
            if node_name is not None:
                patch = {"metadata": {"annotations": {SELECTED_NODE: None}}}
                self._store.patch(CLAIMS, namespace_of(claim), name_of(claim), patch)
            return node_name is not None
        self._store.create(VOLUMES, provisioned(claim, storage_class, node))
        text = f"Successfully provisioned volume {_volume_name(claim)}"
        self._events.write(claim, CLAIM, "Normal", "ProvisioningSucceeded", text)
        return True


def _delay_s(storage_class: Json) -> float:
    return float(at_path(storage_class, "parameters.delay") or 0.0)


def _refusal(storage_class: Json, node: Json) -> str:
    """Return why there is no volume for a node, or for any if the node is empty."""
    failing = (at_path(storage_class, "parameters") or {}).get("fails-on", "").split(",")
    if "*" in failing or (node and name_of(node) in failing):
        return f"no space left for node {name_of(node)}" if node else "no space left"
    if node and not topology_of(storage_class, node):
        return f"node {name_of(node)} is in no allowed topology"
    return ""


def provisioned(claim: Json, storage_class: Json, node: Json | None) -> Json:
    """Return a new volume for a claim, in reach of a node if one is given.

    It can be reached in the node's zone, or from the node alone if that has none; without a node,
    in the first allowed topology, or anywhere. So it is with one that several nodes can mount at
    once, as drivers of network file systems report no topology.
    """
    spec: dict[str, Any] = {
        "accessModes": at_path(claim, "spec.accessModes"),
        "capacity": at_path(claim, "spec.resources.requests"),
        "volumeMode": at_path(claim, "spec.volumeMode"),
        "claimRef": reference_to(claim),
        "persistentVolumeReclaimPolicy": storage_class.get("reclaimPolicy"),
        "storageClassName": name_of(storage_class),
        "csi": {"driver": storage_class.get("provisioner"), "volumeHandle": _volume_name(claim)},
    }
    is_shared = not SHARED_MODES.isdisjoint(list_at(claim, "spec.accessModes"))
    reach = _reach(storage_class, None if is_shared else node)
    if reach:
        terms = {"nodeSelectorTerms": [{"matchExpressions": reach}]}
        spec["nodeAffinity"] = {"required": terms}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {
            "name": _volume_name(claim),
            "annotations": {PROVISIONED_BY: storage_class.get("provisioner")},
        },
        "spec": spec,
    }


def _reach(storage_class: Json, node: Json | None) -> list[Json]:
    """Return the requirements on nodes that can reach a new volume."""
    if node is not None:
        key = next(key for key in (ZONE, HOSTNAME) if key in labels_of(node))
        return [{"key": key, "operator": "In", "values": [labels_of(node)[key]]}]
    terms = storage_class.get("allowedTopologies") or [{}]
    return [
        {"key": expression["key"], "operator": "In", "values": expression["values"]}
        for expression in list_at(terms[0], "matchLabelExpressions")
    ]


def _volume_name(claim: Json) -> str:
    return f"pvc-{claim['metadata']['uid']}"
