"""Leases and Bindings for the pods whose node kube-scheduler chooses.

It tries a pod again if the bind verb fails: a pod that is not bound keeps no reservation, unless
its Binding may have been sent.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from msgspec import structs

from services.binder.bind.pod_binder import PodBinder
from services.binder.clients import PodClient
from shared.model.devices.node import HOSTNAME, AntiAffinityTerm
from shared.model.errors import ConflictError, UnavailableError
from shared.model.events.pod_events import BindingFailed, PlacementChosen
from shared.model.events.request_reply import PodBindingReply, PodBindingRequest
from shared.model.leases.lease import LIVE, Lease, LeaseState
from shared.model.leases.ledger import (
    AlreadyLeased,
    NoCapacity,
    Reservation,
    ReservationOutcome,
    ReservedLease,
    TooLarge,
    reservation_for,
)
from shared.model.names import Namespace, NodeName, PodUid
from shared.pods.pod_snapshot import PodSnapshot
from shared.runtime.service import answers

DEADLINE_S = 3.0
"""Attempts to bind a pod begin within this time; kube-scheduler waits for 5 s."""
RETRY_S = 0.1
"""Pause between attempts to bind a pod for kube-scheduler."""
RESERVATION_S = 10.0
"""How long a reservation lasts if this binder dies before it commits the lease."""


Claimed = Callable[[PodUid], Awaitable[Reservation | None]]


@dataclass(eq=False)
class SchedulerBindings:
    """Any number of binders may get the same request: the pod has one lease."""

    pods: PodBinder
    api: PodClient
    claimed: Claimed

    def __post_init__(self) -> None:
        self.ledger = self.pods.ledger
        self.clock = self.pods.clock

    @answers(concurrency=32)
    async def bind_chosen(self, request: PodBindingRequest) -> PodBindingReply:
        deadline = self.clock.ticks() + DEADLINE_S
        lease = await self._reserve(request)
        if isinstance(lease, PodBindingReply):
            return lease
        if lease.node != request.placement.node:
            reason = f"the pod is being bound to node {lease.node}"
            return PodBindingReply(reason=reason, node=lease.node)
        conflict = await self._conflict(lease, request)
        if conflict:
            return await self._give_up(lease, conflict)
        placement = PlacementChosen(lease=lease, trace=request.queued.trace)
        while True:
            try:
                events = await self.pods.bind_pods([placement])
            except (UnavailableError, ConflictError) as error:
                if self.clock.ticks() < deadline:
                    await self.clock.sleep(RETRY_S)
                    continue
                return await self._give_up(lease, str(error))
            await self.pods.publish(events)
            failures = [event.reason for event in events if isinstance(event, BindingFailed)]
            if failures:
                return PodBindingReply(reason=failures[0])
            return PodBindingReply(bound=True, node=lease.node, lease=lease)

    async def _conflict(self, lease: Lease, request: PodBindingRequest) -> str:
        if not request.repels or lease.state is not LeaseState.RESERVED:
            return ""
        try:
            return await self._repelled(lease, request.repels)
        except (UnavailableError, ConflictError) as error:
            return str(error)

    async def _repelled(self, lease: Lease, terms: Iterable[AntiAffinityTerm]) -> str:
        """kube-scheduler's cache lacks pods that placers have just placed."""
        for term in terms:
            on_node = lease.node if term.topology_key == HOSTNAME else None
            selected = await self.api.list_selected(term, on_node)
            for pod, node in await self._with_nodes(selected):
                if await self._in_one_domain(term.topology_key, lease.node, node):
                    return (
                        f"{_described(pod, lease.namespace)}, which the pod's required "
                        f"anti-affinity selects, starts on node {node}"
                    )
        return ""

    async def _with_nodes(
        self, selected: Sequence[PodSnapshot]
    ) -> list[tuple[PodSnapshot, NodeName]]:
        unbound = [pod.pod for pod in selected if pod.node is None]
        leases = await self.ledger.load(unbound) if unbound else []
        leased = {lease.pod: lease.node for lease in leases if lease and lease.state in LIVE}
        nodes = [(pod, pod.node or leased.get(pod.pod)) for pod in selected]
        return [(pod, node) for pod, node in nodes if node is not None]

    async def _in_one_domain(self, key: str, node: NodeName, other: NodeName) -> bool:
        if node == other or key == HOSTNAME:
            return node == other
        labels = await self.api.node_labels(node)
        others = await self.api.node_labels(other)
        value = (labels or {}).get(key)
        return value is not None and value == (others or {}).get(key)

    async def _reserve(self, request: PodBindingRequest) -> Lease | PodBindingReply:
        pod = request.queued.pod
        node = request.placement.node
        outcome: ReservationOutcome = NoCapacity(pod=pod, reason=f"{node}: no share is free")
        if request.placement.shares:
            wanted = reservation_for(request.queued, (request.placement,), repels=request.repels)
            outcome = await self._outcome(wanted)
        else:
            [lease] = await self.ledger.load([pod])
            if lease is not None:
                return lease
        if isinstance(outcome, NoCapacity) and not outcome.quotas:
            preempted = await self.claimed(pod)
            if preempted is not None and preempted.candidates[0].node == node:
                outcome = await self._outcome(structs.replace(preempted, repels=request.repels))
        match outcome:
            case ReservedLease(lease=lease) | AlreadyLeased(lease=lease):
                return lease
            case NoCapacity():
                return PodBindingReply(
                    reason=outcome.reason, no_capacity=not outcome.quotas, quotas=outcome.quotas
                )
            case TooLarge(reason=reason):
                return PodBindingReply(reason=f"the pod's lease cannot be stored: {reason}")
        return PodBindingReply(reason="the pod has terminated or was deleted")

    async def _outcome(self, wanted: Reservation) -> ReservationOutcome:
        [outcome] = await self.ledger.reserve([wanted], now=self.clock.now(), ttl_s=RESERVATION_S)
        return outcome

    async def _give_up(self, lease: Lease, reason: str) -> PodBindingReply:
        """A lease that is still reserved ends: no Binding was sent."""
        if lease.state is LeaseState.RESERVED:
            try:
                ended = await self.pods.updater.release_unmoved([lease], reason="it was not bound")
            except ConflictError:
                return PodBindingReply(reason=reason, node=lease.node)
            if ended:
                return PodBindingReply(reason=reason)
        return PodBindingReply(reason=reason, node=lease.node)


def _described(pod: PodSnapshot, namespace: Namespace) -> str:
    return f"pod {pod.name}" if pod.namespace == namespace else "a pod of another namespace"
