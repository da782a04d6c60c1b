"""Answers in the status of ResourceClaims: leased or refused, and who else has answered."""

import asyncio
from dataclasses import dataclass, replace

from services.binder.agent_client import NodeAgentClient
from services.binder.claim_client import ClaimAnswer, ClaimClient
from services.binder.claims.claim_ender import ClaimEnder
from shared.model.claim import LEASED, REFUSED
from shared.model.errors import ConflictError, LeaseholdError, RequestError, UnavailableError
from shared.model.events.claim_events import AllocatedClaim
from shared.model.lease import Lease
from shared.model.lease_copy import copy_of, load_lease

MAX_WRITES = 16
"""Claims answered at once."""
ATTEMPTS = 3
"""Writes of one answer, while others change the claim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerResult:
    """What became of an answer."""

    ended: tuple[Lease, ...] = ()
    """The claim's lease, if the allocation is gone or another binder has refused it."""
    unwritten: str = ""
    """Why it is not written yet; empty: it is, or need not be any more."""


DONE = AnswerResult()
PERMITTED = ClaimAnswer(
    condition=LEASED,
    reason="Leased",
    message="administrative access takes nothing of the devices",
)


def leased_answer(lease: Lease) -> ClaimAnswer:
    """Return the answer to a claim that has this lease."""
    return ClaimAnswer(
        condition=LEASED,
        reason="Leased",
        message=f"leased on node {lease.node} with version {lease.version}",
        lease=copy_of(lease),
    )


class AnswerWriter:
    """Writes answers; the API server decides between binders by the claim's version."""

    def __init__(self, claims: ClaimClient, agents: NodeAgentClient, ender: ClaimEnder) -> None:
        self.claims = claims
        self.agents = agents
        self.ender = ender
        self._writes = asyncio.Semaphore(MAX_WRITES)

    async def confirm(self, claim: AllocatedClaim, lease: Lease) -> AnswerResult:
        """Write that the claim is leased; end the lease if the allocation is gone.

        An answer with another lease's copy is written again: that lease was lost.
        """
        try:
            found = await self._write(
                claim, leased_answer(lease), replaces=not _is_copy(claim, lease)
            )
        except LeaseholdError as error:
            return AnswerResult(unwritten=str(error))
        if found is not None and found.answer == LEASED:
            return DONE
        return AnswerResult(ended=tuple(await self.ender.end(lease)))

    async def permit(self, claim: AllocatedClaim) -> AnswerResult:
        """Write that a claim with nothing but administrative access may be used."""
        try:
            await self._write(claim, PERMITTED)
        except LeaseholdError as error:
            return AnswerResult(unwritten=str(error))
        return DONE

    async def refuse(self, claim: AllocatedClaim, text: str) -> AnswerResult:
        """Let the node's slices follow the ledger, then write why the claim is refused."""
        message = await self.lower_slices(claim, text)
        answer = ClaimAnswer(condition=REFUSED, reason="Ledger", message=message)
        try:
            await self._write(claim, answer, replaces=True)
        except LeaseholdError as error:
            return AnswerResult(unwritten=str(error))
        return DONE

    async def lower_slices(self, claim: AllocatedClaim, text: str) -> str:
        """Let the node's slices follow the ledger; return the refusal, with why they are late."""
        late = await self.agents.write_slices(claim.node)
        return f"{text} (the node's ResourceSlices may be late: {late})" if late else text

    async def _write(
        self, claim: AllocatedClaim, answer: ClaimAnswer, *, replaces: bool = False
    ) -> AllocatedClaim | None:
        """Return the claim with its answer, which may be another binder's; None: it is gone.

        The answer that the claim had when it was decided stays, too, unless this one replaces it.
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


def _is_copy(claim: AllocatedClaim, lease: Lease) -> bool:
    """Return whether the claim has a copy of this lease, with the same shares and fences."""
    try:
        copy = load_lease(claim.lease, namespace=claim.namespace, name=claim.name)
    except RequestError:
        return False
    return (copy.pod, copy.shares) == (lease.pod, lease.shares)
