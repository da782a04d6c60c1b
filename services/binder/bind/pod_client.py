"""Pods and core/v1 Events at the API server, as the binder reads and writes them."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from msgspec import Struct

from services.binder.bind.binding import ObservedPod
from services.binder.report.explanations import ObservedCondition
from services.binder.resize.resizer import PodAnnotations
from shared.kubernetes.client import KubernetesClient, pod_path
from shared.kubernetes.errors import KubernetesConflictError, NotFoundError
from shared.kubernetes.types import ApiPodSpec, ObjectMeta
from shared.model.names import NodeName, PodUid

TERMINAL = frozenset({"Succeeded", "Failed"})


class _Condition(Struct, frozen=True):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class _Status(Struct, frozen=True):
    phase: str = ""
    conditions: tuple[_Condition, ...] = ()


class _Metadata(Struct, frozen=True):
    metadata: ObjectMeta = ObjectMeta()


class _Pod(Struct, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    spec: ApiPodSpec = ApiPodSpec()
    status: _Status = _Status()


class _Event(Struct, frozen=True):
    count: int | None = None


class PodClient:
    """Translates between the API server's objects and the binder's own values."""

    def __init__(self, kube: KubernetesClient) -> None:
        self.kube = kube
        self.bind_pod = kube.bind_pod

    async def look(self, namespace: str, name: str) -> ObservedPod | None:
        """Return the pod as it is now, or None if there is none."""
        pod = await self._read(namespace, name)
        if pod is None:
            return None
        return ObservedPod(
            uid=PodUid(pod.metadata.uid),
            node=NodeName(pod.spec.node_name) or None,
            ending=pod.metadata.deletion_timestamp is not None,
            over=pod.status.phase in TERMINAL,
        )

    async def get_condition(self, namespace: str, name: str) -> ObservedCondition | None:
        """Return the condition PodScheduled of the pod, or None if there is no such pod."""
        pod = await self._read(namespace, name)
        if pod is None:
            return None
        said = next((c for c in pod.status.conditions if c.type == "PodScheduled"), _Condition())
        return ObservedCondition(
            uid=PodUid(pod.metadata.uid),
            node=pod.spec.node_name,
            resource_version=pod.metadata.resource_version,
            status=said.status,
            reason=said.reason,
            message=said.message,
        )

    async def get_annotations(self, namespace: str, name: str) -> PodAnnotations | None:
        """Return a pod's annotations, or None if there is no such pod."""
        try:
            pod = await self.kube.read(pod_path(namespace, name), _Metadata)
        except NotFoundError:
            return None
        return PodAnnotations(
            uid=PodUid(pod.metadata.uid),
            resource_version=pod.metadata.resource_version,
            annotations=pod.metadata.annotations,
        )

    async def annotate(
        self, namespace: str, name: str, read: PodAnnotations, annotations: Mapping[str, str]
    ) -> None:
        """Add to them, in one write. Raises ConflictError if the pod has changed since."""
        metadata = {
            "uid": read.uid,
            "resourceVersion": read.resource_version,
            "annotations": annotations,
        }
        await self.kube.patch_merge(pod_path(namespace, name), {"metadata": metadata})

    async def patch_status(self, namespace: str, name: str, patch: Mapping[str, Any]) -> None:
        """Apply a strategic patch to `pods/status`. Raises ConflictError if the pod moved on."""
        await self.kube.patch_strategic(f"{pod_path(namespace, name)}/status", patch)

    async def open_gate(self, namespace: str, name: str, uid: str, gate: str) -> bool:
        """Take a scheduling gate off the pod of exactly this uid; False if that pod is gone."""
        gates = [{"$patch": "delete", "name": gate}]
        patch = {"metadata": {"uid": uid}, "spec": {"schedulingGates": gates}}
        try:
            await self.kube.patch_strategic(pod_path(namespace, name), patch)
        except (NotFoundError, KubernetesConflictError):
            return False
        return True

    async def create_event(self, namespace: str, body: Mapping[str, Any]) -> None:
        """Create an Event. Raises ConflictError if there is one of that name."""
        await self.kube.create(_events(namespace), body)

    async def patch_event(self, namespace: str, name: str, patch: Mapping[str, Any]) -> None:
        """Change an Event. Raises RequestError if there is none (any more)."""
        await self.kube.patch_merge(f"{_events(namespace)}/{quote(name, safe='')}", patch)

    async def event_count(self, namespace: str, name: str) -> int:
        """Return how often it happened so far, as stored; 0 if there is none."""
        try:
            event = await self.kube.read(f"{_events(namespace)}/{quote(name, safe='')}", _Event)
        except NotFoundError:
            return 0
        return event.count or 1

    async def _read(self, namespace: str, name: str) -> _Pod | None:
        try:
            return await self.kube.read(pod_path(namespace, name), _Pod)
        except NotFoundError:
            return None


def _events(namespace: str) -> str:
    return f"/api/v1/namespaces/{quote(namespace, safe='')}/events"
