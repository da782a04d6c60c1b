"""Events that follow from the observed states of ResourceClaims; pure."""

from shared.model.events.claim_events import AllocatedClaim, ClaimAllocated, ClaimDeallocated
from shared.model.names import PodUid

ClaimEvent = ClaimAllocated | ClaimDeallocated
UNANSWERED_CALLS = 1


class ClaimTracker:
    """ResourceClaims with devices of our driver allocated."""

    def __init__(self) -> None:
        self.allocated: dict[PodUid, AllocatedClaim] = {}
        self._unanswered: dict[PodUid, int] = {}
        """How often in a row `resync_unanswered` found a claim without an answer."""

    def update(self, claim: PodUid, now: AllocatedClaim | None) -> list[ClaimEvent]:
        """Update a claim; None: it has no allocation of ours, or was deleted."""
        before = self.allocated.pop(claim, None)
        if now is not None:
            self.allocated[claim] = now
        same = now is not None and before is not None and now.generation == before.generation
        events: list[ClaimEvent] = []
        if before is not None and not same:
            events.append(_deallocated(before))
        if now is not None and not (same and before is not None and _is_served(now, before)):
            events.append(ClaimAllocated(claim=now))
        return events

    def resync(self) -> list[ClaimEvent]:
        """Publish all claims: the ledger may have lost the lease of one that was answered."""
        return [ClaimAllocated(claim=claim) for claim in self.allocated.values()]

    def resync_unanswered(self) -> list[ClaimEvent]:
        """Publish claims that the call before found without an answer: an event may be lost."""
        self._unanswered = {
            uid: self._unanswered.get(uid, 0) + 1
            for uid, claim in self.allocated.items()
            if not claim.answer
        }
        return [
            ClaimAllocated(claim=self.allocated[uid])
            for uid, calls in self._unanswered.items()
            if calls > UNANSWERED_CALLS
        ]


def _is_served(now: AllocatedClaim, before: AllocatedClaim) -> bool:
    """Return whether the event of the same allocation's earlier state covers this one."""
    return now.consumers == before.consumers and (bool(now.answer) or not before.answer)


def _deallocated(claim: AllocatedClaim) -> ClaimDeallocated:
    return ClaimDeallocated(
        claim=claim.claim,
        namespace=claim.namespace,
        name=claim.name,
        node=claim.node,
        generation=claim.generation,
    )
