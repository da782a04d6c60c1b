"""Ends leases of ResourceClaims: when the claim is neither allocated nor prepared any more.

The order differs: with a grace period the kubelet unprepares a claim before it is deallocated; a
pod that is deleted by force loses its claim while its containers still run.
"""

from collections.abc import Callable, Sequence

from services.binder.agent_client import NodeAgentClient
from services.binder.ledger_sync.ledger_updates import CLAIM_ENDED, lease_changes
from shared.ledger.leases import RedisLeases
from shared.model.errors import UnavailableError
from shared.model.events.claim_events import ClaimDeallocated
from shared.model.events.pod_events import LeaseChanged
from shared.model.lease import Lease, LeaseState


class ClaimEnder:
    """Stateless: what must still end is in the ledger, for any binder."""

    def __init__(
        self, ledger: RedisLeases, agents: NodeAgentClient, capacity_freed: Callable[[], None]
    ) -> None:
        self.ledger = ledger
        self.agents = agents
        self.capacity_freed = capacity_freed

    async def end_deallocated(self, events: Sequence[ClaimDeallocated]) -> list[LeaseChanged]:
        """End the leases of these allocations; those that are prepared, once they are not.

        A lease of a later allocation stays.
        """
        generations = {event.claim: event.generation for event in events}
        ended: list[Lease] = []
        for lease in await self.ledger.load(list(generations)):
            if lease and lease.claim and lease.claim.generation == generations[lease.pod]:
                ended += await self.end(lease)
        return lease_changes(ended)

    async def end(self, lease: Lease) -> list[Lease]:
        """End a lease whose allocation is gone; nothing if its claim may be prepared.

        Then it ends when its node's agent confirms that the claim is not. A lease that has changed
        since it was read, as when its last consumers left one after the other, is read again.
        """
        now: Lease | None = lease
        while now is not None and _generation(now) == _generation(lease):
            if now.state is LeaseState.RESERVED or await self.is_unprepared(now):
                if ended := await self.release(now):
                    return ended
            elif all(await self.ledger.claims.mark_deallocated([now])):
                return []
            [now] = await self.ledger.load([lease.pod])
        return []

    async def release(self, lease: Lease) -> list[Lease]:
        """End a lease of which no container has devices; nothing if it has changed since."""
        ended = await self.ledger.release([lease.pod], reason=CLAIM_ENDED, version=lease.version)
        if ended:
            self.capacity_freed()
        return ended

    async def is_unprepared(self, lease: Lease) -> bool:
        """Return whether the node's agent confirms that the claim is not prepared."""
        try:
            return lease.pod in await self.agents.list_terminated(lease.node, [lease.pod])
        except UnavailableError:
            return False


def _generation(lease: Lease) -> str:
    return lease.claim.generation if lease.claim else ""
