"""A binder's part for claims, on a real ledger."""

import json
from dataclasses import replace

from services.binder.claims.claim_admission import ClaimAdmission
from services.binder.claims.claim_answers import AnswerWriter
from services.binder.claims.claim_ender import ClaimEnder
from services.binder.claims.claim_leaser import ClaimLeaser
from shared.ledger.leases import RedisLeases
from shared.model.claim import LEASED
from shared.model.events.claim_events import AllocatedClaim, ClaimAllocated, ClaimDeallocated
from shared.model.events.pod_events import LeaseChanged
from shared.model.events.request_reply import ClaimLeaseReply, ClaimLeaseRequest
from shared.model.lease import Lease
from tests.support.binder.claims import FakeClaims
from tests.support.binder.world import FakeAgents, FakeBus
from tests.support.clock import FakeClock
from tests.support.placer.ledger import NOW, uuid

GPU = uuid("a", 0)


class ClaimBinder:
    """Leases, answers and ends claims."""

    def __init__(self, leases: RedisLeases, claims: FakeClaims, agents: FakeAgents) -> None:
        self.leases, self.claims, self.agents = leases, claims, agents
        self.clock, self.bus = FakeClock(NOW), FakeBus()
        self.ender = ClaimEnder(leases, agents, lambda: None)
        answers = AnswerWriter(claims, agents, self.ender)
        self.leaser = ClaimLeaser(
            ledger=leases,
            publish=self.bus.publish,
            answers=answers,
            ender=self.ender,
            clock=self.clock,
        )
        self.admission = ClaimAdmission(
            ledger=leases,
            publish=self.bus.publish,
            leaser=self.leaser,
            answers=answers,
            ender=self.ender,
            clock=self.clock,
            host_clock=self.clock,
        )

    async def lease(self, *claims: AllocatedClaim) -> list[LeaseChanged]:
        return await self.leaser.lease([ClaimAllocated(claim=claim) for claim in claims])

    async def admit(self, claim: AllocatedClaim) -> ClaimLeaseReply:
        """Lease a claim as its allocation is written."""
        return await self.admission.lease(ClaimLeaseRequest(claim=claim))

    def write(self, claim: AllocatedClaim, reply: ClaimLeaseReply) -> AllocatedClaim:
        """Write the allocation with the answer, as the API server does."""
        copy = json.dumps(json.loads(reply.devices[0])["data"])
        return self.claims.put(replace(claim, answer=LEASED, lease=copy))

    async def deallocate(self, claim: AllocatedClaim) -> list[LeaseChanged]:
        self.claims.stored.pop(claim.name, None)
        gone = ClaimDeallocated(
            claim=claim.claim,
            namespace=claim.namespace,
            name=claim.name,
            node=claim.node,
            generation=claim.generation,
        )
        return await self.ender.end_deallocated([gone])

    def answered(self, claim: AllocatedClaim) -> list[str]:
        return [answer.condition for answer in self.claims.answers.get(claim.name, [])]

    async def lease_of(self, claim: AllocatedClaim) -> Lease | None:
        [lease] = await self.leases.load([claim.claim])
        return lease
