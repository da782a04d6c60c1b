"""Clients of the binder: pods and Events at the API server, and node agents."""

import logging
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec import Struct

from shared.dialects import KUBE_SCHEDULER
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import (
    EvictionBlockedError,
    KubernetesConflictError,
    NotFoundError,
    OverloadedError,
    RequestRejectedError,
)
from shared.kubernetes.paths import node_path, objects_path, pod_path
from shared.kubernetes.types import (
    ApiObject,
    ApiPod,
)
from shared.model.devices.node import AntiAffinityTerm, LabelRequirement
from shared.model.errors import UnavailableError
from shared.model.events.request_reply import (
    BindReply,
    BindRequest,
    LimitsReply,
    LimitsRequest,
)
from shared.model.leases.lease import Lease
from shared.model.leases.preemption import PREEMPT_AT, EvictionOutcome, Victim
from shared.model.names import NodeName, PodUid
from shared.model.quantity import timestamp
from shared.nats.bus import Bus, NoRespondersError
from shared.nats.slices_requests import request_slices
from shared.nats.termination_requests import list_terminated
from shared.pods.pod_snapshot import PodSnapshot, snapshot_of

logger = logging.getLogger(__name__)

SEVERAL_DISRUPTION_BUDGETS = 500
"""Several PodDisruptionBudgets select the pod: it can never be evicted."""
Item = TypeVar("Item")
_OTHERS = f"spec.schedulerName!={KUBE_SCHEDULER},status.phase!=Succeeded,status.phase!=Failed"
"""Active pods of schedulers without the extender."""
LIMITS_TIMEOUT_S = 3.0
"""An agent writes its checkpoint and measures memory twice before it replies."""
BIND_TIMEOUT_S = 0.5
"""A batch of Bindings waits for the reply."""


class _EventCount(Struct, frozen=True):
    count: int | None = None


class PodClient:
    def __init__(self, client: KubernetesClient) -> None:
        self.client = client
        self.bind_pod = client.bind_pod

    async def get(self, namespace: str, name: str) -> PodSnapshot | None:
        try:
            return snapshot_of(await self.client.read(pod_path(namespace, name), ApiPod))
        except NotFoundError:
            return None

    async def list_unbound(self, namespace: str, most: int) -> dict[PodUid, PodSnapshot]:
        query = {"fieldSelector": "spec.nodeName="}
        page = await self.client.list_page(
            objects_path(namespace, "pods"), query=query, limit=most, continue_token=""
        )
        return {pod.pod: pod for pod in map(snapshot_of, page.read(ApiPod))}

    async def list_selected(
        self, term: AntiAffinityTerm, node: NodeName | None
    ) -> list[PodSnapshot]:
        """With a `node`, return only pods on it or on none yet."""
        labels = ",".join(map(_requirement, term.selector))
        paths = [objects_path(namespace, "pods") for namespace in term.namespaces]
        places = ("",) if node is None else (",spec.nodeName=", f",spec.nodeName={node}")
        return [
            snapshot_of(pod)
            for path in (["/api/v1/pods"] if term.all_namespaces else paths)
            for place in places
            for pod in await self._list(
                path, ApiPod, labelSelector=labels, fieldSelector=_OTHERS + place
            )
        ]

    async def node_labels(self, name: NodeName) -> Mapping[str, str] | None:
        try:
            node = await self.client.read(node_path(name), ApiObject)
        except NotFoundError:
            return None
        return node.metadata.labels

    async def annotate(
        self,
        namespace: str,
        name: str,
        uid: str,
        annotations: Mapping[str, str | None],
        *,
        resource_version: str = "",
    ) -> None:
        """Set annotations in one write, or remove those that are None.

        Raises ConflictError for another uid, and if the pod has changed since that version.
        """
        metadata: dict[str, Any] = {"uid": uid, "annotations": annotations}
        if resource_version:
            metadata["resourceVersion"] = resource_version
        await self.client.patch_merge(pod_path(namespace, name), {"metadata": metadata})

    async def patch_status(self, namespace: str, name: str, patch: Mapping[str, Any]) -> None:
        """Raises ConflictError if the pod's resource version has changed."""
        await self.client.patch_strategic(f"{pod_path(namespace, name)}/status", patch)

    async def remove_gate(self, namespace: str, name: str, uid: str, gate: str) -> bool:
        """Return whether the pod with this uid is there."""
        gates = [{"$patch": "delete", "name": gate}]
        patch = {"metadata": {"uid": uid}, "spec": {"schedulingGates": gates}}
        try:
            await self.client.patch_strategic(pod_path(namespace, name), patch)
        except (NotFoundError, KubernetesConflictError):
            return False
        return True

    async def create_event(self, namespace: str, body: Mapping[str, Any]) -> None:
        """Raises ConflictError if there is an Event of that name."""
        await self.client.create(objects_path(namespace, "events"), body)

    async def patch_event(self, namespace: str, name: str, patch: Mapping[str, Any]) -> None:
        """Raises RequestError if there is no such Event."""
        await self.client.patch_merge(objects_path(namespace, "events", name), patch)

    async def get_event_count(self, namespace: str, name: str) -> int:
        try:
            event = await self.client.read(objects_path(namespace, "events", name), _EventCount)
        except NotFoundError:
            return 0
        return event.count or 1

    async def announce(self, victim: Victim, at: float) -> None:
        """Annotate the pod, if possible. Raises UnavailableError as `evict` does."""
        await self._annotate(victim, timestamp(at))

    async def withdraw(self, victim: Victim) -> None:
        await self._annotate(victim, None)

    async def evict(
        self, victim: Victim | PodSnapshot, *, dry_run: bool = False
    ) -> tuple[EvictionOutcome, str]:
        """Evict the pod with exactly this uid; return the outcome and its reason.

        Raises UnavailableError if the API server does not answer, or reports a conflict although
        the pod is there.
        """
        namespace, name = victim.namespace, victim.name
        try:
            return await self._written(
                victim, self.client.evict(namespace, name, uid=victim.pod, dry_run=dry_run)
            )
        except EvictionBlockedError as error:
            return EvictionOutcome.BLOCKED, error.response.message
        except OverloadedError as error:
            if error.response.code == SEVERAL_DISRUPTION_BUDGETS:
                return EvictionOutcome.BLOCKED, error.response.message
            raise

    async def _annotate(self, victim: Victim, value: str | None) -> None:
        namespace, name = victim.namespace, victim.name
        notes = {PREEMPT_AT: value}
        outcome, reason = await self._written(
            victim, self.annotate(namespace, name, victim.pod, notes)
        )
        if outcome is EvictionOutcome.BLOCKED:
            logger.warning("pod %s/%s is not annotated: %s", namespace, name, reason)

    async def _written(
        self, victim: Victim | PodSnapshot, write: Awaitable[object]
    ) -> tuple[EvictionOutcome, str]:
        """Return EVICTED if it was written."""
        try:
            await write
        except NotFoundError as error:
            return EvictionOutcome.GONE, error.response.message
        except RequestRejectedError as error:
            # Rejected by an admission policy of the cluster, for example.
            return EvictionOutcome.BLOCKED, error.response.message
        except KubernetesConflictError as error:
            pod = await self.get(victim.namespace, victim.name)
            if pod is not None and pod.pod == victim.pod:  # the same write may succeed later
                raise UnavailableError(
                    f"pod {victim.namespace}/{victim.name}: {error.response.message}; "
                    "tried again soon"
                ) from error
            return EvictionOutcome.GONE, error.response.message
        return EvictionOutcome.EVICTED, ""

    async def _list(self, path: str, kind: type[Item], **query: str) -> list[Item]:
        pages = self.client.pages(path, query=query)
        return [item async for page in pages for item in page.read(kind)]


def _requirement(requirement: LabelRequirement) -> str:
    values = ",".join(requirement.values)
    match requirement.operator:
        case "In":
            return f"{requirement.key} in ({values})"
        case "NotIn":
            return f"{requirement.key} notin ({values})"
        case "Exists":
            return requirement.key
    return f"!{requirement.key}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoReply:
    reason: str
    has_responder: bool


class NodeAgentClient:
    def __init__(self, bus: Bus) -> None:
        self.bus = bus

    async def list_terminated(self, node: NodeName, pods: Sequence[PodUid]) -> set[PodUid]:
        """Return the pods whose last container has terminated; none while NATS is away.

        Raises UnavailableError if the node agent does not reply.
        """
        return await list_terminated(self.bus, node, pods)

    async def renew_slices(self, node: NodeName) -> str:
        """Let kube-scheduler try the pods again that wait for devices of ResourceClaims.

        Returns why the slices are not written anew, or an empty text.
        """
        return await request_slices(self.bus, node, renewed=True)

    async def request_bind(self, node: NodeName, leases: Sequence[Lease]) -> BindReply | NoReply:
        """Return which of the pods must wait.

        Raises UnavailableError while NATS is away: the agent is not the cause then.
        """
        request = BindRequest(node=node, leases=tuple(leases))
        try:
            return await self.bus.request(request, BindReply, timeout_s=BIND_TIMEOUT_S)
        except NoRespondersError as error:
            return NoReply(reason=str(error), has_responder=False)
        except UnavailableError as error:
            if not self.bus.connected:
                raise
            return NoReply(reason=str(error), has_responder=True)

    async def set_limits(self, request: LimitsRequest) -> LimitsReply:
        """Raises UnavailableError if the node agent does not reply."""
        return await self.bus.request(request, LimitsReply, timeout_s=LIMITS_TIMEOUT_S)
