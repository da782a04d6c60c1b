"""A CSI driver's provisioner, as far as schedulers notice it, on a real API server."""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.kubernetes.errors import KubernetesConflictError, NotFoundError
from shared.kubernetes.reflector import follow
from shared.kubernetes.storage_objects import ApiVolume, ApiVolumeClaim
from shared.pods.storage import SELECTED_NODE
from tests.real.control_plane import ControlPlane, Json
from tests.support.storage import HOSTNAME, in_, required

DRIVER = "disks.example.com"
PROVISIONER = "volume.kubernetes.io/storage-provisioner"
"""By this annotation of kube-controller-manager a provisioner knows its claims."""
CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
VOLUMES = "/api/v1/persistentvolumes"
RETRY_S = 1.0
FAILURE = "rpc error: code = ResourceExhausted desc = no space is left"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskClass:
    """How the volumes of a class are made."""

    reach: str = HOSTNAME
    """Nodes with the same value of this label reach a volume; empty: all nodes."""
    waits: bool = True
    """Its claims wait until a node is selected for them."""
    delay_s: float = 0.0
    fails_on: frozenset[str] = frozenset()
    """Nodes without space."""


@dataclass(slots=True)
class Disks:
    """Provisions volumes for claims, and deletes those that are released.

    Where there is no space, it takes back the choice of the node, as external-provisioner does.
    """

    plane: ControlPlane
    nodes: Mapping[str, Mapping[str, str]]
    """Labels by node."""
    classes: dict[str, DiskClass] = field(default_factory=dict)
    _begun: set[tuple[str, str]] = field(default_factory=set)
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    async def add_class(self, name: str, disks: DiskClass, **fields: object) -> None:
        self.classes[name] = disks
        mode = "WaitForFirstConsumer" if disks.waits else "Immediate"
        manifest: Json = {"metadata": {"name": name}, "provisioner": DRIVER, **fields}
        await self.plane.create(CLASSES, manifest | {"volumeBindingMode": mode})

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_claims())
            tasks.create_task(self._follow_volumes())

    async def _follow_claims(self) -> None:
        path = "/api/v1/persistentvolumeclaims"
        async for batch in follow(self.plane.kube, path, ApiVolumeClaim, retry_s=RETRY_S):
            for _, claim in batch.changed:
                if claim is not None and self._is_due(claim):
                    task = asyncio.create_task(self._provision(claim))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)

    def _is_due(self, claim: ApiVolumeClaim) -> bool:
        notes = claim.metadata.annotations
        if claim.spec.volume_name or notes.get(PROVISIONER) != DRIVER:
            return False
        choice = claim.metadata.uid, notes.get(SELECTED_NODE, "")
        waits = self.classes[claim.spec.storage_class_name or ""].waits
        if (waits and SELECTED_NODE not in notes) or choice in self._begun:
            return False
        self._begun.add(choice)
        return True

    async def _provision(self, claim: ApiVolumeClaim) -> None:
        meta = claim.metadata
        node = meta.annotations.get(SELECTED_NODE, "")
        disks = self.classes[claim.spec.storage_class_name or ""]
        await asyncio.sleep(disks.delay_s)
        with contextlib.suppress(NotFoundError, KubernetesConflictError):
            if node in disks.fails_on:
                await self._fail(claim)
                self._begun.discard((meta.uid, node))
            else:
                await self.plane.create(VOLUMES, self._volume(claim, node, disks))

    async def _fail(self, claim: ApiVolumeClaim) -> None:
        meta = claim.metadata
        place = f"/api/v1/namespaces/{meta.namespace}"
        about = {"kind": "PersistentVolumeClaim", "namespace": meta.namespace, "name": meta.name}
        event = {
            "metadata": {"generateName": meta.name},
            "involvedObject": about | {"uid": meta.uid, "apiVersion": "v1"},
            "reason": "ProvisioningFailed",
            "message": f"failed to provision volume: {FAILURE}",
            "type": "Warning",
        }
        await self.plane.create(f"{place}/events", event)
        notes = {"metadata": {"annotations": {SELECTED_NODE: None}}}
        await self.plane.kube.patch_merge(f"{place}/persistentvolumeclaims/{meta.name}", notes)

    def _volume(self, claim: ApiVolumeClaim, node: str, disks: DiskClass) -> Json:
        meta = claim.metadata
        spec: Json = {
            "capacity": {"storage": claim.spec.resources.requests["storage"]},
            "accessModes": list(claim.spec.access_modes),
            "persistentVolumeReclaimPolicy": "Delete",
            "storageClassName": claim.spec.storage_class_name,
            "csi": {"driver": DRIVER, "volumeHandle": meta.uid},
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "namespace": meta.namespace,
                "name": meta.name,
                "uid": meta.uid,
            },
        }
        if disks.reach and node:
            label = disks.reach
            spec["nodeAffinity"] = required(in_(label, self.nodes[node][label]))
        return {"metadata": {"name": f"pvc-{meta.uid}"}, "spec": spec}

    async def _follow_volumes(self) -> None:
        async for batch in follow(self.plane.kube, VOLUMES, ApiVolume, retry_s=RETRY_S):
            for _, volume in batch.changed:
                if volume is None or volume.status.phase != "Released":
                    continue
                if volume.spec.storage_class_name in self.classes:
                    with contextlib.suppress(NotFoundError):
                        await self.plane.kube.delete(f"{VOLUMES}/{volume.metadata.name}")
