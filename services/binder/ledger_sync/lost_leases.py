"""Restores leases that the ledger has lost while their pods run.

A node agent reports its allocations. If the ledger has no lease for such a pod, and Kubernetes
shows the pod bound to that node, a write of the ledger was lost: an older file was loaded, or a
rebuild missed a Binding in flight.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Self

from msgspec import structs

from services.binder.clients import NodeAgentClient
from services.binder.ledger_sync.lease_holders import LeaseHolders
from services.binder.ledger_sync.recovery import Evidence, evidence_of
from services.binder.metrics import count_anomaly
from services.binder.observations import PodSnapshot
from services.binder.report.explanations import summarize
from shared.ledger.leases import RedisLeases
from shared.model.clock import Clock
from shared.model.errors import LeaseholdError, UnavailableError
from shared.model.lease import Lease, LeaseState
from shared.model.names import NodeName, PodUid

logger = logging.getLogger(__name__)

SHARE_IN_USE = "its claim is not prepared, and a pod whose lease was lost uses the device"
BOUND_BEFORE = "the pod runs with an earlier lease, which was lost"


@dataclass(slots=True)
class LostOutcome:
    """What came of allocations without a lease."""

    again: set[PodUid] = field(default_factory=set)
    """Pods to be tried again."""
    refused: dict[NodeName, str] = field(default_factory=dict)
    """Nodes whose agents report what they cannot have, with why."""

    def add(self, other: Self) -> None:
        """Add what came of more allocations."""
        self.again |= other.again
        self.refused |= other.refused


@dataclass(eq=False)
class LostLeases:
    """Compares allocations without a lease with Kubernetes."""

    ledger: RedisLeases
    holders: LeaseHolders
    agents: NodeAgentClient
    _: KW_ONLY
    clock: Clock

    async def read_copies(self, leases: Sequence[Lease]) -> list[str | None]:
        """Return the copy of its lease that each holder carries, or None if it cannot be read now.

        The text is empty if it carries none, or is not the holder of the lease any more.
        """
        return [
            None
            if isinstance(pod, LeaseholdError)
            else pod.lease
            if pod is not None and pod.pod == lease.pod
            else ""
            for lease, pod in zip(leases, await self.holders.read(leases), strict=True)
        ]

    async def restore(self, used: Iterable[Lease]) -> LostOutcome:
        """Restore the leases of those pods that run on the nodes whose agents report them.

        Their reservations, and leases of claims that are not prepared, make room. A lease that does
        not fit beside others then stays out until one of these has ended: the node agent gives out
        nothing more of the device meanwhile.
        """
        outcome = LostOutcome()
        leases = list(used)
        found = await self.holders.read(leases)
        lost: list[Evidence] = []
        for lease, pod in zip(leases, found, strict=True):
            match _evidence(lease, pod):
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
        hearsay = {each.lease.pod for each in lost if each.is_hearsay}
        active = [
            structs.replace(each.lease, state=LeaseState.ACTIVE, expires_at=0.0) for each in lost
        ]
        now = self.clock.now()
        misfits = await self.ledger.restore(active, now=now, hearsay=hearsay)
        again = [lease for lease, _ in misfits]
        if again and [*await self._end_reserved(again), *await self._end_unprepared(again)]:
            misfits = await self.ledger.restore(again, now=now, hearsay=hearsay)
        count_anomaly("lost_leases", len(lost))
        texts = [f"{each.namespace}/{each.name} on {each.node}" for each in active]
        logger.error("the ledger had lost the leases of running pods: %s", summarize(texts))
        if misfits:
            texts = [f"{each.namespace}/{each.name}: {reason}" for each, reason in misfits]
            logger.error("they do not fit beside other leases yet: %s", summarize(texts))
        return {lease.pod for lease, _ in misfits}

    async def _end_reserved(self, misfits: Sequence[Lease]) -> list[Lease]:
        """End reservations of these pods, which run: a rollback brought them back; return them."""
        found = await self.ledger.load([lease.pod for lease in misfits])
        held = [lease for lease in found if lease and lease.state is LeaseState.RESERVED]
        return await release_as_read(self.ledger, held, reason=BOUND_BEFORE)

    async def _end_unprepared(self, misfits: Sequence[Lease]) -> list[Lease]:
        """End leases of claims on the same devices that no container uses; return them."""
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


def _evidence(
    lease: Lease, pod: PodSnapshot | LeaseholdError | None
) -> Evidence | LeaseholdError | str:
    """Return the lease of a pod that runs on its node; or an empty text if it does not run.

    Or the error if that is unknown; or why its agent cannot have it, if it runs elsewhere.
    """
    if isinstance(pod, LeaseholdError):
        return pod
    if pod is None or pod.pod != lease.pod or pod.terminal or pod.node is None:
        return ""
    if pod.node != lease.node:
        return f"pod {lease.pod} is on node {pod.node}"
    return evidence_of(lease, pod.lease)


async def release_as_read(
    ledger: RedisLeases, leases: Iterable[Lease], *, reason: str
) -> list[Lease]:
    """End leases that have not changed since they were read; return all that ended with them."""
    ended = await asyncio.gather(
        *(ledger.release([each.pod], reason=reason, version=each.version) for each in leases)
    )
    return [lease for batch in ended for lease in batch]
