"""Leases allocations of ResourceClaims while schedulers write them, so that no pod waits for it.

A webhook asks during the write of the allocation, and adds the answer to that same write. Whatever
is not decided then is decided after it, and the pod waits for its binding conditions.
"""

import json

from services.binder.claim_client import ClaimAnswer, device_statuses
from services.binder.claims.claim_answers import PERMITTED, AnswerWriter, leased_answer
from services.binder.claims.claim_ender import ClaimEnder
from services.binder.claims.claim_leaser import ClaimDecisions, ClaimLeaser, covers
from services.binder.ledger_sync.ledger_updates import lease_changes
from shared.ledger.leases import RedisLeases
from shared.model.clock import Clock
from shared.model.errors import ConflictError, UnavailableError
from shared.model.events.claim_events import AllocatedClaim
from shared.model.events.request_reply import ClaimLeaseReply, ClaimLeaseRequest
from shared.model.lease import Lease
from shared.model.names import PodUid
from shared.runtime.service import Publish

WRITTEN_S = 10.0
"""After this time, an allocation that was not written never will be."""


class ClaimAdmission:
    """Any number of binders may get the same request: the claim has one lease."""

    def __init__(
        self,
        *,
        ledger: RedisLeases,
        publish: Publish,
        leaser: ClaimLeaser,
        answers: AnswerWriter,
        ender: ClaimEnder,
        clock: Clock,
        host_clock: Clock,
    ) -> None:
        self.ledger = ledger
        self.publish = publish
        self.leaser = leaser
        self.answers = answers
        self.ender = ender
        self.clock = clock
        self.host_clock = host_clock
        self._leased: dict[PodUid, tuple[AllocatedClaim, float]] = {}
        """Claims that were leased, and when: the API server may reject the write."""

    async def lease(self, request: ClaimLeaseRequest) -> ClaimLeaseReply:
        """Return the answer, or an empty reply if it is not decided now.

        Before a refusal the node's slices follow the ledger.
        """
        try:
            return await self._lease(request.claim, request.trace)
        except (ConflictError, UnavailableError):
            return ClaimLeaseReply()

    async def end_unwritten(self) -> list[Lease]:
        """End the leases of allocations that were not written."""
        ended: list[Lease] = []
        until = self.clock.ticks() - WRITTEN_S
        for claim in [claim for claim, at in self._leased.values() if at <= until]:
            if not await self._has(claim, claim.generation):
                [lease] = await self.ledger.load([claim.claim])
                if lease is not None and covers(lease, claim):
                    ended += await self.ender.end(lease)
            if self._leased[claim.claim][0] is claim:
                del self._leased[claim.claim]
        return ended

    async def _lease(self, claim: AllocatedClaim, trace: str) -> ClaimLeaseReply:
        decisions = ClaimDecisions({claim.claim: trace})
        [known] = await self.ledger.load([claim.claim])
        if known is not None and covers(known, claim):
            decisions.leased.append((claim, known))
        elif known is None or await self._has_ended(known, claim):
            await self.leaser.reserve([claim], decisions)
        for _, text in decisions.refused:
            return ClaimLeaseReply(refusal=await self.answers.lower_slices(claim, text))
        for _ in decisions.permitted:
            return self._reply(claim, PERMITTED)
        for _, lease in await self.leaser.commit(decisions):
            self._leased[claim.claim] = claim, self.clock.ticks()
            return self._reply(claim, leased_answer(lease))
        return ClaimLeaseReply()

    async def _has_ended(self, lease: Lease, claim: AllocatedClaim) -> bool:
        """End the lease of an earlier allocation of the claim; return whether it has ended."""
        if lease.claim is None or await self._has(claim, lease.claim.generation):
            return False
        ended = await self.ender.end(lease)
        await self.publish(lease_changes(ended))
        return bool(ended)

    async def _has(self, claim: AllocatedClaim, generation: str) -> bool:
        """Return whether the claim has this allocation at the API server."""
        now = await self.answers.claims.get_allocation(claim.namespace, claim.name)
        return now is not None and (now.claim, now.generation) == (claim.claim, generation)

    def _reply(self, claim: AllocatedClaim, answer: ClaimAnswer) -> ClaimLeaseReply:
        entries = device_statuses(claim, answer, now=self.host_clock.now())
        return ClaimLeaseReply(devices=tuple(map(json.dumps, entries)))
