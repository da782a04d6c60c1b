"""What agents report: leases that the ledger has lost are restored; what cannot be is refused.

A write of the ledger was lost, or a rebuild missed a Binding in flight.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Self, TypeVar

from services.binder.clients import NodeAgentClient
from services.binder.ledger_sync.lease_holders import LeaseHolders
from services.binder.ledger_sync.recovery import Evidence, evidence_now
from services.binder.metrics import count_anomaly
from services.binder.report.event_writer import EventRecorder
from services.binder.report.explanations import refused_event, summarize
from shared.ledger.leases import RedisLeases
from shared.model.clock import Clock
from shared.model.errors import LeaseholdError, UnavailableError
from shared.model.events.node_events import HealthChanged, LeaseHolder, ShareRefused, ViolationFound
from shared.model.leases.lease import Lease, LeaseState
from shared.model.names import NodeName, PodUid

logger = logging.getLogger(__name__)

SHARE_IN_USE = "its claim is not prepared, and a pod whose lease was lost uses the device"
BOUND_BEFORE = "the pod runs with an earlier lease, which was lost"
LOOKUPS_S = 10.0
"""Time over which look-ups of pods without a lease are counted for each node."""
MOST_LOOKUPS = 32
"""For the agent of one node, within `LOOKUPS_S`."""
E = TypeVar("E", ShareRefused, ViolationFound)


@dataclass(slots=True)
class LostAllocations:
    again: set[PodUid] = field(default_factory=set)
    refused: dict[NodeName, str] = field(default_factory=dict)
    """Nodes whose agents report what they cannot have."""

    def add(self, other: Self) -> None:
        self.again |= other.again
        self.refused |= other.refused


@dataclass(eq=False)
class LostLeases:
    ledger: RedisLeases
    holders: LeaseHolders
    agents: NodeAgentClient
    _: KW_ONLY
    clock: Clock

    async def read_copies(self, leases: Sequence[Lease]) -> list[str | None]:
        """Return the copy that each holder carries, or None if it cannot be read now."""
        return [
            None
            if isinstance(pod, LeaseholdError)
            else pod.lease
            if pod is not None and pod.pod == lease.pod
            else ""
            for lease, pod in zip(leases, await self.holders.read(leases), strict=True)
        ]

    async def restore(self, used: Iterable[Lease]) -> LostAllocations:
        """Restore the leases of pods that run on the nodes whose agents report them.

        Their reservations, and leases of unprepared claims, make room. A lease that does not fit
        then stays out until others have ended.
        """
        outcome = LostAllocations()
        leases = list(used)
        holders = await self.holders.read(leases)
        lost: list[Evidence] = []
        for lease, pod in zip(leases, holders, strict=True):
            match evidence_now(lease, pod):
                case Evidence() as evidence:
                    lost.append(evidence)
                case LeaseholdError():
                    outcome.again.add(lease.pod)
                case str(reason) if reason:
                    outcome.again.add(lease.pod)
                    outcome.refused[lease.node] = reason
        outcome.again |= await self._restore(lost)
        return outcome

    async def _restore(self, lost: Sequence[Evidence]) -> set[PodUid]:
        if not lost:
            return set()
        hearsay = {evidence.lease.pod for evidence in lost if evidence.is_hearsay}
        active = [evidence.lease for evidence in lost]
        now = self.clock.now()
        misfits = await self.ledger.restore(active, now=now, hearsay=hearsay)
        again = [lease for lease, _ in misfits]
        if again and [*await self._end_reserved(again), *await self._end_unprepared(again)]:
            misfits = await self.ledger.restore(again, now=now, hearsay=hearsay)
        count_anomaly("lost_leases", len(lost))
        texts = [f"{lease.namespace}/{lease.name} on {lease.node}" for lease in active]
        logger.error("the ledger had lost the leases of running pods: %s", summarize(texts))
        if misfits:
            texts = [f"{lease.namespace}/{lease.name}: {reason}" for lease, reason in misfits]
            logger.error("they do not fit beside other leases yet: %s", summarize(texts))
        return {lease.pod for lease, _ in misfits}

    async def _end_reserved(self, misfits: Sequence[Lease]) -> list[Lease]:
        """A rollback has brought the reservations of these running pods back."""
        stored = await self.ledger.load([lease.pod for lease in misfits])
        held = [lease for lease in stored if lease and lease.state is LeaseState.RESERVED]
        return await release_as_read(self.ledger, held, reason=BOUND_BEFORE)

    async def _end_unprepared(self, misfits: Sequence[Lease]) -> list[Lease]:
        """End leases of claims on the same devices that no container uses."""
        devices = {share.device for lease in misfits for share in lease.shares}
        ended: list[Lease] = []
        for node in {lease.node for lease in misfits}:
            claims = {
                lease.pod: lease
                for lease in await self.ledger.load_node(node)
                if lease.claim and devices & {share.device for share in lease.shares}
            }
            try:
                unprepared = await self.agents.list_terminated(node, list(claims)) if claims else ()
            except UnavailableError:
                continue
            ended += await release_as_read(
                self.ledger, [claims[pod] for pod in unprepared], reason=SHARE_IN_USE
            )
        return ended


async def release_as_read(
    ledger: RedisLeases, leases: Iterable[Lease], *, reason: str
) -> list[Lease]:
    """End leases that have not changed since they were read; return these, and their gangs'."""
    ended = await asyncio.gather(
        *(ledger.release([lease.pod], reason=reason, version=lease.version) for lease in leases)
    )
    return [lease for batch in ended for lease in batch]


@dataclass(eq=False)
class NodeRefusals:
    """Refuses what is not a node's to say.

    A node may speak of a pod that has a lease there, or that Kubernetes shows there.
    """

    ledger: RedisLeases
    holders: LeaseHolders
    events: EventRecorder
    distrust: Callable[[NodeName, str], None]
    clock: Clock

    def __post_init__(self) -> None:
        self._lookups = Counter[NodeName]()
        self._lookups_until = 0.0

    def refuse(self, node: str, reason: str) -> None:
        count_anomaly("refused_of_nodes")
        self.events.record(refused_event(NodeName(node), reason))
        self.distrust(NodeName(node), reason)

    def refuse_all(self, reasons: Mapping[NodeName, str]) -> None:
        for node, reason in reasons.items():
            self.refuse(node, reason)

    async def own(self, events: Sequence[E]) -> list[E]:
        pods = [event.pod for event in events if event.pod]
        leases = dict(zip(pods, await self.ledger.load(pods) if pods else [], strict=True))
        accepted = await asyncio.gather(*(self._is_own(event, leases) for event in events))
        return [event for event, is_own in zip(events, accepted, strict=True) if is_own]

    async def _is_own(self, event: E, leases: Mapping[PodUid, Lease | None]) -> bool:
        if not (event.pod and event.namespace and event.name):
            return False
        lease = leases[event.pod]
        if lease is not None and lease.node == event.node and _is_named(event, lease):
            return True
        if not self._may_look_up(event.node):
            return False
        try:
            pod = await self.holders.find(event.namespace, event.name, claim=event.claim)
        except LeaseholdError as error:
            logger.warning("pod %s/%s is not known: %s", event.namespace, event.name, error)
            return False
        if pod is None or pod.pod != event.pod or pod.node is None:
            return False
        if pod.node != event.node:
            self.refuse(event.node, f"{event.subject}: pod {event.pod} is on node {pod.node}")
        return pod.node == event.node

    def _may_look_up(self, node: NodeName) -> bool:
        now = self.clock.ticks()
        if now >= self._lookups_until:
            self._lookups.clear()
            self._lookups_until = now + LOOKUPS_S
        self._lookups[node] += 1
        if self._lookups[node] == MOST_LOOKUPS + 1:
            logger.warning(
                "node %s reports more than %d pods without a lease there within %g s: the others "
                "are ignored",
                node,
                MOST_LOOKUPS,
                LOOKUPS_S,
            )
        return self._lookups[node] <= MOST_LOOKUPS

    async def with_own_holders(self, events: Sequence[HealthChanged]) -> list[HealthChanged]:
        pods = list({holder.pod for event in events for holder in event.holders})
        leases = dict(zip(pods, await self.ledger.load(pods) if pods else [], strict=True))
        return [replace(event, holders=_holders_of(event, leases)) for event in events]


def _holders_of(
    event: HealthChanged, leases: Mapping[PodUid, Lease | None]
) -> tuple[LeaseHolder, ...]:
    of_holders = (leases[holder.pod] for holder in event.holders)
    return tuple(
        LeaseHolder(
            pod=lease.pod,
            namespace=lease.namespace,
            name=lease.name,
            claim=lease.claim is not None,
        )
        for lease in of_holders
        if lease is not None
        and lease.node == event.node
        and any(share.device == event.device for share in lease.shares)
    )


def _is_named(event: ShareRefused | ViolationFound, lease: Lease) -> bool:
    named = (event.namespace, event.name, event.claim)
    return named == (lease.namespace, lease.name, lease.claim is not None)
