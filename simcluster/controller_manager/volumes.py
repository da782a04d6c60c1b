"""Provisions and binds the PersistentVolumes of claims, and deletes them with their claims.

Every StorageClass is provisioned, whatever its provisioner: no volume holds data. A volume for a
pod's node can be reached in the node's zone, or from the node alone if it has none.
"""

import asyncio
import logging
from typing import Any

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import (
    Json,
    annotations_of,
    at_path,
    labels_of,
    name_of,
    namespace_of,
)
from simcluster.ports import ClusterStore

log = logging.getLogger(__name__)

RETRY_S = 1.0
ZONE = "topology.kubernetes.io/zone"
HOSTNAME = "kubernetes.io/hostname"
SELECTED_NODE = "volume.kubernetes.io/selected-node"
CLAIMS = "persistentvolumeclaims"
VOLUMES = "persistentvolumes"


class VolumeController:
    """Plays the parts of kube-controller-manager and of a provisioner."""

    def __init__(self, store: ClusterStore) -> None:
        self._store = store

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            watch = self._store.watch(CLAIMS)
            try:
                while True:
                    for event in watch.poll():
                        if event.type == "DELETED":
                            self._delete_volume(event.object)
                    waiting = [self._bind(claim) for claim in self._store.list(CLAIMS)]
                    async with asyncio.timeout(RETRY_S if any(waiting) else None):
                        await watch.wait()
            except TimeoutError:
                continue
            except ApiError as error:
                log.info("watching claims from the start: %s", error)
                await asyncio.sleep(RETRY_S)

    def _bind(self, claim: Json) -> bool:
        """Bind a claim if it can be bound; return whether it waits."""
        if at_path(claim, "status.phase") == "Bound" or "deletionTimestamp" in claim["metadata"]:
            return False
        volume = self._volume(claim)
        if volume is None:
            return True
        name = name_of(volume)
        namespace = namespace_of(claim)
        spec = volume["spec"]
        self._store.patch(VOLUMES, None, name, {"spec": {"claimRef": _reference(claim)}})
        self._store.patch(VOLUMES, None, name, {"status": {"phase": "Bound"}}, subresource="status")
        self._store.patch(CLAIMS, namespace, name_of(claim), {"spec": {"volumeName": name}})
        status = {key: spec[key] for key in ("accessModes", "capacity") if key in spec}
        status["phase"] = "Bound"
        self._store.patch(
            CLAIMS, namespace, name_of(claim), {"status": status}, subresource="status"
        )
        return False

    def _volume(self, claim: Json) -> Json | None:
        """Return the volume that a claim names, or a new one of its class; None: not yet."""
        named = at_path(claim, "spec.volumeName")
        if named:
            record = self._store.find(VOLUMES, None, str(named))
            return None if record is None else record.obj
        wanted = at_path(claim, "spec.storageClassName")
        kind = self._store.find("storageclasses", None, str(wanted)) if wanted else None
        if kind is None:
            return None
        node: Json | None = None
        if kind.obj.get("volumeBindingMode") == "WaitForFirstConsumer":
            record = self._store.find("nodes", None, annotations_of(claim).get(SELECTED_NODE, ""))
            if record is None:
                return None
            node = record.obj
        return self._store.create(VOLUMES, provisioned(claim, kind.obj, node))

    def _delete_volume(self, claim: Json) -> None:
        """Delete the volume that was provisioned for a claim."""
        name = _volume_name(claim)
        if self._store.find(VOLUMES, None, name) is not None:
            self._store.delete(VOLUMES, None, name)


def provisioned(claim: Json, kind: Json, node: Json | None) -> Json:
    """Return a new volume for a claim, in reach of a node if one is given."""
    spec: dict[str, Any] = {
        "accessModes": at_path(claim, "spec.accessModes"),
        "capacity": at_path(claim, "spec.resources.requests"),
        "claimRef": _reference(claim),
        "persistentVolumeReclaimPolicy": "Delete",
        "storageClassName": name_of(kind),
        "csi": {"driver": kind.get("provisioner"), "volumeHandle": _volume_name(claim)},
    }
    if node is not None:
        key = next(key for key in (ZONE, HOSTNAME) if key in labels_of(node))
        reach = {"key": key, "operator": "In", "values": [labels_of(node)[key]]}
        terms = {"nodeSelectorTerms": [{"matchExpressions": [reach]}]}
        spec["nodeAffinity"] = {"required": terms}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": _volume_name(claim)},
        "spec": spec,
    }


def _volume_name(claim: Json) -> str:
    return f"pvc-{claim['metadata']['uid']}"


def _reference(claim: Json) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "namespace": namespace_of(claim),
        "name": name_of(claim),
        "uid": claim["metadata"]["uid"],
    }
