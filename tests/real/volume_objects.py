"""The objects of a case, as an API server stores them: with names of its own, and real UIDs."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from services.binder.bind.claim_progress import BIND_COMPLETED
from shared.model.errors import RequestError
from shared.pods.storage import BETA_CLASS
from tests.real.control_plane import ControlPlane, Json
from tests.support.storage import NAMESPACE
from tests.support.volume_case import Case

KEPT = "example.com/kept"
"""A finalizer."""
STORAGE = "/apis/storage.k8s.io/v1"
PATHS = {
    "StorageClass": f"{STORAGE}/storageclasses",
    "CSIDriver": f"{STORAGE}/csidrivers",
    "CSIStorageCapacity": f"{STORAGE}/namespaces/kube-system/csistoragecapacities",
    "PersistentVolume": "/api/v1/persistentvolumes",
}
ORDER = ("StorageClass", "CSIDriver", "CSIStorageCapacity", "PersistentVolumeClaim")
GATE = "example.com/not-yet"


@dataclass(slots=True)
class VolumeWorld:
    """The namespace of one case. Objects that belong to no namespace end with its number."""

    plane: ControlPlane
    case: Case
    number: int
    uids: dict[str, str] = field(default_factory=dict)
    """Real UIDs by those of the case."""
    refused: str = ""
    """Why the API server does not store one of the objects."""

    @property
    def namespace(self) -> str:
        return f"case-{self.number}"

    @property
    def pods(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    @property
    def pod_uid(self) -> str:
        return self.uids["uid-train"]

    async def create(self) -> None:
        """Create the pod, with a gate, and everything of the case."""
        for namespace in (self.namespace, f"{self.namespace}-other"):
            await self.plane.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
        if any("uid-train" in users for users in self.case.users.values()):
            self.refused = "a pod with a node is not scheduled again"
            return
        try:
            pod = await self.plane.create(self.pods, self._pod("train", self.case.uses))
            self.uids["uid-train"] = pod["metadata"]["uid"]
            for claim, users in self.case.users.items():
                for user, node in users.items():
                    other = self._pod(user.removeprefix("uid-"), (claim,), node=node)
                    await self.plane.create(self.pods, other)
            for manifest in sorted(self.case.objects, key=_order):
                await self._create(deepcopy(manifest))
        except RequestError as error:
            self.refused = str(error)

    async def open(self) -> None:
        """Let the scheduler see the pod."""
        await self.plane.kube.patch_merge(f"{self.pods}/train", {"spec": {"schedulingGates": None}})

    def _pod(self, name: str, uses: tuple[str, ...], *, node: str = "") -> Json:
        volumes = [
            {"name": use[1:], "ephemeral": {"volumeClaimTemplate": {"spec": CLAIM_SPEC}}}
            if use[0] == "~"
            else {"name": f"v{number}", "persistentVolumeClaim": {"claimName": use}}
            for number, use in enumerate(uses)
        ]
        resources = {"limits": {"nvidia.com/gpu": "1"}}
        spec: Json = {
            "containers": [{"name": "c", "image": "pause", "resources": resources}],
            "volumes": volumes,
        }
        spec |= {"nodeName": node} if node else {"schedulingGates": [{"name": GATE}]}
        return {"metadata": {"name": name}, "spec": spec}

    async def _create(self, manifest: Json) -> None:
        kind = manifest.pop("kind")
        meta = manifest["metadata"]
        uid = meta.pop("uid", "")
        path = PATHS.get(kind, "")
        if kind == "PersistentVolumeClaim":
            meta["namespace"] = self._namespace(meta.pop("namespace"))
            path = f"/api/v1/namespaces/{meta['namespace']}/persistentvolumeclaims"
        else:
            meta["name"] = self._own(meta["name"])
            meta.pop("namespace", None)
        deleted = bool(meta.pop("deletionTimestamp", ""))
        if deleted:
            meta["finalizers"] = [KEPT]
        self._rename(kind, manifest)
        stored = await self.plane.create(path, manifest)
        if uid:
            self.uids[uid] = stored["metadata"]["uid"]
        if deleted:
            await self.plane.kube.delete(f"{path}/{meta['name']}")

    def _rename(self, kind: str, manifest: Json) -> None:
        meta = manifest["metadata"]
        spec = manifest.get("spec", {})
        for owner in meta.get("ownerReferences", ()):
            owner["apiVersion"] = "v1"
            owner["uid"] = self.uids.get(owner["uid"], owner["uid"])
        for place, name in ((spec, "storageClassName"), (manifest, "storageClassName"),
                            (spec, "volumeName"), (manifest, "provisioner"),
                            (spec.get("csi", {}), "driver"),
                            (meta.get("annotations", {}), BETA_CLASS)):  # fmt: skip
            if place.get(name):
                place[name] = self._own(place[name])
        if kind == "PersistentVolumeClaim" and manifest["status"]["phase"] in {"Bound", "Lost"}:
            meta["annotations"] = {**meta.get("annotations", {}), BIND_COMPLETED: "yes"}
        if kind == "PersistentVolume":
            if not any(source in spec for source in ("csi", "nfs", "gcePersistentDisk")):
                spec["hostPath"] = {"path": "/data"}
            if reference := spec.get("claimRef"):
                reference["namespace"] = self._namespace(reference["namespace"])
                reference["uid"] = self.uids.get(reference.get("uid", ""), reference.get("uid"))

    def _namespace(self, namespace: str) -> str:
        return self.namespace if namespace == NAMESPACE else f"{self.namespace}-{namespace}"

    def _own(self, name: str) -> str:
        return name if name.startswith("kubernetes.io/") else f"{name}-{self.number}"


CLAIM_SPEC: Mapping[str, Any] = {
    "accessModes": ["ReadWriteOnce"],
    "resources": {"requests": {"storage": "1Gi"}},
}


def _order(manifest: Json) -> int:
    """Claims come before volumes, which may name the UID of their claim."""
    kind = manifest["kind"]
    return ORDER.index(kind) if kind in ORDER else len(ORDER)
