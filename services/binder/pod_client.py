"""Pods and core/v1 Events at the API server, as the binder reads and writes them."""

from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import quote

from msgspec import Struct

from services.binder.observations import ObservedCondition, PodAnnotations, PodSnapshot, SelectedPod
from shared.dialects import KUBE_SCHEDULER
from shared.kubernetes.client import KubernetesClient, pod_path
from shared.kubernetes.errors import KubernetesConflictError, NotFoundError
from shared.kubernetes.types import ApiObject, ApiPod, Condition
from shared.model.lease_copy import ANNOTATION
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.node import AntiAffinityTerm, LabelRequirement

TERMINAL_PHASES = frozenset({"Succeeded", "Failed"})
_OTHERS = f"spec.schedulerName!={KUBE_SCHEDULER},status.phase!=Succeeded,status.phase!=Failed"
"""Field selector of active pods of schedulers without the extender."""


class _EventCount(Struct, frozen=True):
    count: int | None = None


class PodClient:
    """Translates between the API server's objects and the binder's values."""

    def __init__(self, client: KubernetesClient) -> None:
        self.client = client
        self.bind_pod = client.bind_pod

    async def get(self, namespace: str, name: str) -> PodSnapshot | None:
        """Return the pod as it is now; None: there is none."""
        pod = await self._get(namespace, name)
        if pod is None:
            return None
        return PodSnapshot(
            uid=PodUid(pod.metadata.uid),
            node=NodeName(pod.spec.node_name) or None,
            deleting=pod.metadata.deletion_timestamp is not None,
            terminal=pod.status.phase in TERMINAL_PHASES,
            lease=pod.metadata.annotations.get(ANNOTATION, ""),
        )

    async def node_exists(self, name: NodeName) -> bool:
        """Return whether the API server has the node now."""
        try:
            await self.client.read(f"/api/v1/nodes/{quote(name, safe='')}", ApiObject)
        except NotFoundError:
            return False
        return True

    async def list_selected(
        self, term: AntiAffinityTerm, node: NodeName | None
    ) -> list[SelectedPod]:
        """Return the active pods of schedulers without the extender that the term selects.

        With a `node`, only those on it or on none yet.
        """
        paths = [f"/api/v1/namespaces/{quote(each, safe='')}/pods" for each in term.namespaces]
        places = ("",) if node is None else (",spec.nodeName=", f",spec.nodeName={node}")
        return [
            pod
            for path in (["/api/v1/pods"] if term.all_namespaces else paths)
            for place in places
            async for pod in self._listed(path, term, _OTHERS + place)
        ]

    async def _listed(
        self, path: str, term: AntiAffinityTerm, fields: str
    ) -> AsyncIterator[SelectedPod]:
        query = {"labelSelector": _selector(term), "fieldSelector": fields}
        async for page in self.client.pages(path, query=query):
            for pod in page.read(ApiPod):
                yield SelectedPod(
                    uid=PodUid(pod.metadata.uid),
                    namespace=Namespace(pod.metadata.namespace),
                    name=pod.metadata.name,
                    node=NodeName(pod.spec.node_name) or None,
                )

    async def node_label(self, name: NodeName, key: str) -> str | None:
        """Return a label of a node; None: there is no such label or node."""
        try:
            node = await self.client.read(f"/api/v1/nodes/{quote(name, safe='')}", ApiObject)
        except NotFoundError:
            return None
        return node.metadata.labels.get(key)

    async def get_condition(self, namespace: str, name: str) -> ObservedCondition | None:
        """Return the pod's condition PodScheduled; None: there is no such pod."""
        pod = await self._get(namespace, name)
        if pod is None:
            return None
        conditions = (each for each in pod.status.conditions if each.type == "PodScheduled")
        condition = next(conditions, Condition())
        return ObservedCondition(
            uid=PodUid(pod.metadata.uid),
            node=pod.spec.node_name,
            resource_version=pod.metadata.resource_version,
            status=condition.status,
            reason=condition.reason,
            message=condition.message,
        )

    async def get_annotations(self, namespace: str, name: str) -> PodAnnotations | None:
        """Return a pod's annotations; None: there is no such pod."""
        try:
            pod = await self.client.read(pod_path(namespace, name), ApiObject)
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
        """Add annotations, in one write. Raises ConflictError if the pod has changed since."""
        metadata = {
            "uid": read.uid,
            "resourceVersion": read.resource_version,
            "annotations": annotations,
        }
        await self.client.patch_merge(pod_path(namespace, name), {"metadata": metadata})

    async def add_annotation(
        self, namespace: str, name: str, uid: str, key: str, value: str
    ) -> None:
        """Set one annotation of the pod with this uid. Raises ConflictError for another uid."""
        metadata = {"uid": uid, "annotations": {key: value}}
        await self.client.patch_merge(pod_path(namespace, name), {"metadata": metadata})

    async def patch_status(self, namespace: str, name: str, patch: Mapping[str, Any]) -> None:
        """Apply a strategic merge patch to `pods/status`.

        Raises ConflictError if the pod's resource version has changed.
        """
        await self.client.patch_strategic(f"{pod_path(namespace, name)}/status", patch)

    async def remove_gate(self, namespace: str, name: str, uid: str, gate: str) -> bool:
        """Remove a scheduling gate from the pod with this uid; False if that pod is gone."""
        gates = [{"$patch": "delete", "name": gate}]
        patch = {"metadata": {"uid": uid}, "spec": {"schedulingGates": gates}}
        try:
            await self.client.patch_strategic(pod_path(namespace, name), patch)
        except (NotFoundError, KubernetesConflictError):
            return False
        return True

    async def create_event(self, namespace: str, body: Mapping[str, Any]) -> None:
        """Create an Event. Raises ConflictError if there is one of that name."""
        await self.client.create(_events_path(namespace), body)

    async def patch_event(self, namespace: str, name: str, patch: Mapping[str, Any]) -> None:
        """Change an Event. Raises RequestError if there is none."""
        await self.client.patch_merge(_events_path(namespace, name), patch)

    async def get_event_count(self, namespace: str, name: str) -> int:
        """Return the stored count of an Event; 0 if there is none."""
        try:
            event = await self.client.read(_events_path(namespace, name), _EventCount)
        except NotFoundError:
            return 0
        return event.count or 1

    async def _get(self, namespace: str, name: str) -> ApiPod | None:
        try:
            return await self.client.read(pod_path(namespace, name), ApiPod)
        except NotFoundError:
            return None


def _selector(term: AntiAffinityTerm) -> str:
    """Return a term's selector as the API server reads it."""
    return ",".join(map(_requirement, term.selector))


def _requirement(one: LabelRequirement) -> str:
    values = ",".join(one.values)
    match one.operator:
        case "In":
            return f"{one.key} in ({values})"
        case "NotIn":
            return f"{one.key} notin ({values})"
        case "Exists":
            return one.key
    return f"!{one.key}"


def _events_path(namespace: str, name: str = "") -> str:
    events = f"/api/v1/namespaces/{quote(namespace, safe='')}/events"
    return f"{events}/{quote(name, safe='')}" if name else events
