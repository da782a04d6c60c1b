"""Clients of the binder: pods, Events and ResourceClaims at the API server, and node agents."""

import logging
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec import Struct

from shared.dialects import GPU_RESOURCES, KUBE_SCHEDULER
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import (
    EvictionBlockedError,
    KubernetesConflictError,
    NotFoundError,
    OverloadedError,
    RequestRejectedError,
)
from shared.kubernetes.paths import node_path, objects_path, pod_path
from shared.kubernetes.resource_claims import ApiResourceClaim, allocated_claim, claim_path
from shared.kubernetes.types import (
    ApiObject,
    ApiPod,
)
from shared.model.bounds import cut
from shared.model.clock import Clock
from shared.model.devices.node import AntiAffinityTerm, LabelRequirement
from shared.model.errors import UnavailableError
from shared.model.events.claim_events import AllocatedClaim
from shared.model.events.request_reply import (
    BindReply,
    BindRequest,
    LimitsReply,
    LimitsRequest,
    SlicesReply,
    SlicesRequest,
    TerminationReply,
    TerminationRequest,
)
from shared.model.leases.lease import Lease
from shared.model.leases.preemption import PREEMPT_AT, EvictionOutcome, Victim
from shared.model.names import NodeName, PodUid
from shared.model.quantity import parse_count, timestamp
from shared.model.requests.claim import DRIVER
from shared.nats.bus import Bus, NoRespondersError
from shared.pods.pod_snapshot import PodSnapshot, snapshot_of

logger = logging.getLogger(__name__)

SEVERAL_DISRUPTION_BUDGETS = 500
"""Status code where several PodDisruptionBudgets select the pod: it can never be evicted."""
Item = TypeVar("Item")
_OTHERS = f"spec.schedulerName!={KUBE_SCHEDULER},status.phase!=Succeeded,status.phase!=Failed"
"""Field selector of active pods of schedulers without the extender."""
TERMINATION_TIMEOUT_S = 0.9
LIMITS_TIMEOUT_S = 3.0
"""An agent writes its checkpoint and measures memory twice before it replies."""
SLICES_TIMEOUT_S = 2.0
BIND_TIMEOUT_S = 0.5
"""A batch of Bindings waits for the reply."""
FIELD_MANAGER = "leasehold"


class _EventCount(Struct, frozen=True):
    count: int | None = None


class PodClient:
    """Translates between the API server's objects and the binder's values."""

    def __init__(self, client: KubernetesClient) -> None:
        self.client = client
        self.bind_pod = client.bind_pod

    async def get(self, namespace: str, name: str) -> PodSnapshot | None:
        """Return the pod as it is now, or None if there is none."""
        try:
            return snapshot_of(await self.client.read(pod_path(namespace, name), ApiPod))
        except NotFoundError:
            return None

    async def list_unbound(self, namespace: str, most: int) -> dict[PodUid, PodSnapshot]:
        """Return pods of a namespace that have no node, at most so many."""
        query = {"fieldSelector": "spec.nodeName="}
        page = await self.client.list_page(
            objects_path(namespace, "pods"), query=query, limit=most, continue_token=""
        )
        return {each.pod: each for each in map(snapshot_of, page.read(ApiPod))}

    async def list_selected(
        self, term: AntiAffinityTerm, node: NodeName | None
    ) -> list[PodSnapshot]:
        """Return the active pods of schedulers without the extender that the term selects.

        With a `node`, only those on it or on none yet.
        """
        labels = ",".join(map(_requirement, term.selector))
        paths = [objects_path(each, "pods") for each in term.namespaces]
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
        """Return the labels of a node, or None if there is none."""
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
        """Set annotations of the pod with this uid in one write, or remove those that are None.

        Raises ConflictError for another uid, and if the pod has changed since that version.
        """
        metadata: dict[str, Any] = {"uid": uid, "annotations": annotations}
        if resource_version:
            metadata["resourceVersion"] = resource_version
        await self.client.patch_merge(pod_path(namespace, name), {"metadata": metadata})

    async def patch_status(self, namespace: str, name: str, patch: Mapping[str, Any]) -> None:
        """Apply a strategic merge patch to `pods/status`.

        Raises ConflictError if the pod's resource version has changed.
        """
        await self.client.patch_strategic(f"{pod_path(namespace, name)}/status", patch)

    async def remove_gate(self, namespace: str, name: str, uid: str, gate: str) -> bool:
        """Remove a scheduling gate from the pod with this uid; return whether that pod is there."""
        gates = [{"$patch": "delete", "name": gate}]
        patch = {"metadata": {"uid": uid}, "spec": {"schedulingGates": gates}}
        try:
            await self.client.patch_strategic(pod_path(namespace, name), patch)
        except (NotFoundError, KubernetesConflictError):
            return False
        return True

    async def create_event(self, namespace: str, body: Mapping[str, Any]) -> None:
        """Create an Event. Raises ConflictError if there is one of that name."""
        await self.client.create(objects_path(namespace, "events"), body)

    async def patch_event(self, namespace: str, name: str, patch: Mapping[str, Any]) -> None:
        """Change an Event. Raises RequestError if there is none."""
        await self.client.patch_merge(objects_path(namespace, "events", name), patch)

    async def get_event_count(self, namespace: str, name: str) -> int:
        """Return the stored count of an Event, or 0 if there is none."""
        try:
            event = await self.client.read(objects_path(namespace, "events", name), _EventCount)
        except NotFoundError:
            return 0
        return event.count or 1

    async def announce(self, victim: Victim, at: float) -> None:
        """Annotate the pod, if it is there and can be changed, with the time of its eviction.

        Raises UnavailableError as `evict` does.
        """
        await self._annotate(victim, timestamp(at))

    async def withdraw(self, victim: Victim) -> None:
        """Remove that annotation."""
        await self._annotate(victim, None)

    async def evict(
        self, victim: Victim | PodSnapshot, *, dry_run: bool = False
    ) -> tuple[EvictionOutcome, str]:
        """Evict the pod with exactly this uid, or check whether that is allowed.

        Returns the outcome and the reason for it. Raises UnavailableError if the API server does
        not answer, or reports a conflict although the pod is there.
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
        """Return what came of a write to a pod, and why; EVICTED: it was written."""
        try:
            await write
        except NotFoundError as error:
            return EvictionOutcome.GONE, error.response.message
        except RequestRejectedError as error:
            # Rejected by an admission policy of the cluster, for example.
            return EvictionOutcome.BLOCKED, error.response.message
        except KubernetesConflictError as error:
            found = await self.get(victim.namespace, victim.name)
            if found is not None and found.pod == victim.pod:  # the same write may succeed later
                raise UnavailableError(
                    f"pod {victim.namespace}/{victim.name}: {error.response.message}; "
                    "tried again soon"
                ) from error
            return EvictionOutcome.GONE, error.response.message
        return EvictionOutcome.EVICTED, ""

    async def _list(self, path: str, kind: type[Item], **query: str) -> list[Item]:
        pages = self.client.pages(path, query=query)
        return [item async for page in pages for item in page.read(kind)]


def _requirement(one: LabelRequirement) -> str:
    """Return a requirement of a label as the API server reads it."""
    values = ",".join(one.values)
    match one.operator:
        case "In":
            return f"{one.key} in ({values})"
        case "NotIn":
            return f"{one.key} notin ({values})"
        case "Exists":
            return one.key
    return f"!{one.key}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoReply:
    """A request to a node agent that got no reply."""

    reason: str
    has_responder: bool
    """Whether an agent subscribes to the request's subject."""


class NodeAgentClient:
    """Requests to the agent of one node."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus

    async def list_terminated(self, node: NodeName, pods: Sequence[PodUid]) -> set[PodUid]:
        """Return the pods whose last container has terminated; none while NATS is away.

        Raises UnavailableError if the node agent does not reply.
        """
        if not self.bus.connected:
            return set()
        request = TerminationRequest(node=node, pod=pods[0], more_pods=tuple(pods[1:]))
        reply = await self.bus.request(request, TerminationReply, timeout_s=TERMINATION_TIMEOUT_S)
        more = set(pods[1:]).intersection(reply.terminated_pods)
        return {*more, *(pods[:1] if reply.terminated else ())}

    async def request_bind(self, node: NodeName, leases: Sequence[Lease]) -> BindReply | NoReply:
        """Return which of the pods must wait before they are bound to the node.

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

    async def write_slices(self, node: NodeName) -> str:
        """Let the node's slices follow the ledger; return why they do not, or an empty text."""
        request = SlicesRequest(node=node)
        try:
            reply = await self.bus.request(request, SlicesReply, timeout_s=SLICES_TIMEOUT_S)
        except UnavailableError as error:
            return str(error)
        return "" if reply.written else reply.reason

    async def set_limits(self, request: LimitsRequest) -> LimitsReply:
        """Enforce a lease, or a proposed one.

        Raises UnavailableError if the node agent does not reply.
        """
        return await self.bus.request(request, LimitsReply, timeout_s=LIMITS_TIMEOUT_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimAnswer:
    """The conditions of all devices of a claim: leased, or refused."""

    condition: str
    """`shared.model.requests.claim.LEASED` or `REFUSED`, which becomes True."""
    reason: str
    """In CamelCase."""
    message: str
    lease: Mapping[str, Any] | None = None
    """The copy of the lease, from which a lost ledger is rebuilt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestUse:
    """A container that uses requests of a ResourceClaim, or requests GPUs otherwise."""

    container: str
    claim: str
    """Name of the claim, or empty if the container requests an extended resource of ours."""
    request: str
    """Name of the request, empty for all of them; or of the extended resource."""


def uses_of(pod: ApiPod) -> Iterator[RequestUse]:
    """Yield what containers use: requests of claims, and extended resources of ours."""
    entries = (*pod.status.resource_claim_statuses, *pod.spec.resource_claims)
    names = {each.name: each.resource_claim_name for each in entries if each.resource_claim_name}
    for container in (*pod.spec.init_containers, *pod.spec.containers):
        for used in container.resources.claims:
            claim = names.get(used.name)
            if claim:
                yield RequestUse(container=container.name, claim=claim, request=used.request)
        limits = container.resources.limits
        for resource in sorted(limits.keys() & GPU_RESOURCES):
            if parse_count(limits[resource]):
                yield RequestUse(container=container.name, claim="", request=resource)
    extended = pod.status.extended_resource_claim_status
    for each in extended.request_mappings if extended else ():
        yield RequestUse(
            container=each.container_name,
            claim=extended.resource_claim_name if extended else "",
            request=each.request_name,
        )


@dataclass(eq=False)
class ClaimClient:
    """Translates between the API server's objects and the binder's values."""

    client: KubernetesClient
    clock: Clock

    async def get_allocation(self, namespace: str, name: str) -> AllocatedClaim | None:
        """Return a claim's allocation of our devices as it is now, or None if it has none."""
        try:
            claim = await self.client.read(claim_path(namespace, name), ApiResourceClaim)
        except NotFoundError:
            return None
        return allocated_claim(claim)

    async def list_uses(self, namespace: str, pod: str, uid: PodUid) -> Sequence[RequestUse]:
        """Return what the containers of a pod use; nothing if it is gone."""
        try:
            found = await self.client.read(pod_path(namespace, pod), ApiPod)
        except NotFoundError:
            return ()
        return tuple(uses_of(found)) if found.metadata.uid == uid else ()

    async def answer(self, claim: AllocatedClaim, answer: ClaimAnswer) -> None:
        """Write the conditions of all devices in one server-side apply.

        Only the entries of our driver are ours: those of others stay. Raises ConflictError if the
        claim has changed since it was read, RequestError if it is gone.
        """
        await self.client.apply(
            f"{claim_path(claim.namespace, claim.name)}/status",
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaim",
                "metadata": {
                    "name": claim.name,
                    "namespace": claim.namespace,
                    "uid": claim.claim,
                    "resourceVersion": claim.resource_version,
                },
                "status": {"devices": device_statuses(claim, answer, now=self.clock.now())},
            },
            manager=FIELD_MANAGER,
        )


def device_statuses(
    claim: AllocatedClaim, answer: ClaimAnswer, *, now: float
) -> list[dict[str, Any]]:
    """Return the entries of `status.devices` that answer a claim: one for each of its devices.

    The first has the copy of the lease.
    """
    condition = {
        "type": answer.condition,
        "status": "True",
        "reason": answer.reason,
        "message": cut(answer.message),
        "lastTransitionTime": timestamp(now),
    }
    return [
        {
            "driver": DRIVER,
            "pool": claim.node,
            "device": device.device,
            **({"shareID": device.share_id} if device.share_id else {}),
            "conditions": [condition],
            **({"data": answer.lease} if answer.lease and number == 0 else {}),
        }
        for number, device in enumerate((*claim.devices, *claim.admin_devices))
    ]
