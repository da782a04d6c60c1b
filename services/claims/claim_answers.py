"""Answers in the status of ResourceClaims: leased or refused; and the ends of their leases."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from services.claims.clients import ClaimAgentClient, ClaimAnswer, ClaimClient
from shared.ledger.leases import RedisLeases
from shared.model.errors import ConflictError, LeaseholdError, RequestError, UnavailableError
from shared.model.events.claim_events import AllocatedClaim, ClaimDeallocated
from shared.model.events.pod_events import LeaseChanged, lease_changes
from shared.model.leases.lease import Lease, LeaseState
from shared.model.leases.lease_copy import copy_of
from shared.model.requests.claim import CLAIM_ENDED, LEASED, REFUSED
from shared.pods.carried_leases import bound_claim, copy_in
from shared.pods.pod_snapshot import generation_of
from shared.runtime.service import handles

MAX_WRITES = 16
ATTEMPTS = 3
"""Of one answer."""
PERMITTED = ClaimAnswer(
    condition=LEASED,
    reason="Leased",
    message="administrative access takes nothing of the devices",
)


@dataclass(eq=False)
class ClaimEnder:
    """Ends leases of claims that are neither allocated nor prepared any more.

    A pod that is deleted by force loses its claim while its containers still run.
    """

    ledger: RedisLeases
    agents: ClaimAgentClient

    @handles
    async def end_claims(self, events: Sequence[ClaimDeallocated]) -> list[LeaseChanged]:
        """A lease of a later allocation stays."""
        generations = {event.claim: event.generation for event in events}
        ending = [
            self.end(lease)
            for lease in await self.ledger.load(list(generations))
            if lease and lease.claim and lease.claim.generation == generations[lease.pod]
        ]
        return lease_changes(chain.from_iterable(await asyncio.gather(*ending)))

    async def end(self, lease: Lease) -> list[Lease]:
        """End a lease whose allocation is gone.

        If its claim may be prepared, it ends once the node's agent confirms that it is not.
        """
        now: Lease | None = lease
        while now is not None and generation_of(now) == generation_of(lease):
            if now.state is LeaseState.RESERVED or await self.is_unprepared(now):
                if ended := await self.release(now):
                    return ended
            elif all(await self.ledger.claims.mark_deallocated([now])):
                return []
            [now] = await self.ledger.load([lease.pod])
        return []

    async def release(self, lease: Lease) -> list[Lease]:
        """Nothing ends if the lease has changed since it was read."""
        return await self.ledger.release([lease.pod], reason=CLAIM_ENDED, version=lease.version)

    async def is_unprepared(self, lease: Lease) -> bool:
        try:
            return lease.pod in await self.agents.list_terminated(lease.node, [lease.pod])
        except UnavailableError:
            return False


def leased_answer(claim: AllocatedClaim, lease: Lease) -> ClaimAnswer:
    leased = f"leased on node {lease.node} with version {lease.version}"
    return ClaimAnswer(
        condition=LEASED,
        reason="Leased",
        message=f"{leased}; {claim.warning}" if claim.warning else leased,
        lease=copy_of(lease),
    )


@dataclass(eq=False)
class AnswerWriter:
    claims: ClaimClient
    agents: ClaimAgentClient
    ender: ClaimEnder

    def __post_init__(self) -> None:
        self._writes = asyncio.Semaphore(MAX_WRITES)

    async def confirm(self, claim: AllocatedClaim, lease: Lease) -> list[Lease]:
        """Write that the claim is leased; end and return the lease if the allocation is gone.

        An answer with another lease's copy is written again: that lease was lost.
        """
        copy = copy_in(bound_claim(claim))
        replaces = copy is None or copy.shares != lease.shares
        written = await self._write(claim, leased_answer(claim, lease), replaces=replaces)
        if written is not None and written.answer == LEASED:
            return []
        return await self.ender.end(lease)

    async def permit(self, claim: AllocatedClaim) -> list[Lease]:
        await self._write(claim, PERMITTED)
        return []

    async def refuse(self, claim: AllocatedClaim, text: str) -> list[Lease]:
        message = await self.lower_slices(claim, text)
        answer = ClaimAnswer(condition=REFUSED, reason="Ledger", message=message)
        await self._write(claim, answer, replaces=True)
        return []

    async def lower_slices(self, claim: AllocatedClaim, text: str) -> str:
        """Return the refusal, with why the node's slices are late."""
        late = await self.agents.write_slices(claim.node)
        return f"{text} (the node's ResourceSlices may be late: {late})" if late else text

    async def _write(
        self, claim: AllocatedClaim, answer: ClaimAnswer, *, replaces: bool = False
    ) -> AllocatedClaim | None:
        """Return the claim with its answer, perhaps another binder's, or None if it is gone.

        An earlier answer stays unless this one replaces it.
        """
        now: AllocatedClaim | None = claim
        refusal: LeaseholdError | None = None
        for _ in range(ATTEMPTS):
            if now is None or (now.claim, now.generation) != (claim.claim, claim.generation):
                return None
            decided = (now.answer, now.lease) == (claim.answer, claim.lease)
            if now.answer and not (replaces and decided):
                return now
            try:
                async with self._writes:
                    await self.claims.answer(now, answer)
            except (ConflictError, RequestError) as error:
                refusal = error
            else:
                return replace(now, answer=answer.condition)
            now = await self.claims.get_allocation(claim.namespace, claim.name)
        raise UnavailableError(f"{claim.namespace}/{claim.name} is not answered: {refusal}")
