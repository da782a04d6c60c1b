"""Leases of claims on a real ledger, beside a binder."""

import json
from dataclasses import replace
from typing import Any, cast

from services.claims.clients import ClaimAgentClient
from services.claims.wiring import ClaimPorts, build_claims
from shared.ledger.leases import RedisLeases
from shared.model.events.claim_events import AllocatedClaim, ClaimAllocated, ClaimDeallocated
from shared.model.events.pod_events import LeaseChanged
from shared.model.events.request_reply import ClaimLeaseReply, ClaimLeaseRequest
from shared.model.leases.lease import Lease
from shared.model.requests.claim import LEASED
from tests.support.binder.world import World, allocated, on
from tests.support.placer.ledger import uuid

GPU = uuid("a", 0)


def deallocated(claim: AllocatedClaim) -> ClaimDeallocated:
    return ClaimDeallocated(
        claim=claim.claim,
        namespace=claim.namespace,
        name=claim.name,
        node=claim.node,
        generation=claim.generation,
    )


class ClaimBinder(World):
    """Leases, answers and ends claims."""

    def __init__(self, leases: RedisLeases, **shared: Any) -> None:
        super().__init__(leases, **shared)
        self.service = build_claims(
            ClaimPorts(
                ledger=self.ledger,
                claims=self.claims,
                agents=cast(ClaimAgentClient, self.agents),
                publish=self.bus.publish,
                clock=self.clock,
                host_clock=self.clock,
            )
        )
        self.ender = self.service.ender
        self.leaser = self.service.leaser

    async def lease(self, *claims: AllocatedClaim) -> list[LeaseChanged]:
        return await self.leaser.lease_claims([ClaimAllocated(claim=claim) for claim in claims])

    async def leased(self, name: str = "c", memory_mib: int = 4_000) -> AllocatedClaim:
        """Lease a new claim of so much of the first GPU; return it as it was allocated."""
        claim = self.claims.put(allocated(name, on(GPU, memory_mib)))
        await self.lease(claim)
        return claim

    async def admit(self, claim: AllocatedClaim) -> ClaimLeaseReply:
        """Lease a claim as its allocation is written."""
        return await self.leaser.lease_claim(ClaimLeaseRequest(claim=claim))

    def write(self, claim: AllocatedClaim, reply: ClaimLeaseReply) -> AllocatedClaim:
        """Write the allocation with the answer, as the API server does."""
        copy = json.dumps(json.loads(reply.devices[0])["data"])
        return self.claims.put(replace(claim, answer=LEASED, lease=copy))

    async def deallocate(self, claim: AllocatedClaim) -> list[LeaseChanged]:
        self.claims.stored.pop(claim.name, None)
        return await self.ender.end_claims([deallocated(claim)])

    def answered(self, claim: AllocatedClaim) -> list[str]:
        return [answer.condition for answer in self.claims.answers.get(claim.name, [])]

    async def lease_of(self, claim: AllocatedClaim) -> Lease | None:
        [lease] = await self.ledger.load([claim.claim])
        return lease

    async def held(self, claim: AllocatedClaim) -> Lease:
        """The lease of a claim that has one."""
        lease = await self.lease_of(claim)
        assert lease is not None
        return lease
