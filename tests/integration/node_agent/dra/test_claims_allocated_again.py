"""Claims whose allocation has changed while they are prepared."""

import asyncio

import pytest

from services.node_agent.dra.resource_claims import ClaimReference
from shared.model.errors import UnavailableError
from shared.model.lease import ClaimAllocation
from shared.model.names import Namespace, PodUid
from tests.support.node_agent.agent import share
from tests.support.node_agent.claims import (
    ALLOCATED_AT,
    claim_lease,
    cluster_with_claims,
    create_claim,
    pod_with_claim,
    registered,
    result,
)
from tests.support.waiting import until

pytestmark = pytest.mark.servers


async def test_a_lease_of_an_earlier_allocation_does_not_count() -> None:
    async with cluster_with_claims() as cluster, cluster.running():
        await registered(cluster)
        pod = cluster.node.create(pod_with_claim("one", "shares"))
        claim = create_claim(cluster, "shares", result(), pods=(pod,))
        cluster.ledger.grant(claim_lease(claim, claim=ClaimAllocation(generation="earlier")))

        await until(
            lambda: any(
                event["reason"] == "FailedPrepareDynamicResources"
                for event in cluster.api.store.list("events")
            )
        )

        assert not cluster.activated


async def test_a_claim_that_is_allocated_again_does_not_wait_for_its_earlier_lease() -> None:
    async with cluster_with_claims(rate=1) as cluster, cluster.running() as agent:
        await registered(cluster)
        claim = create_claim(cluster, "shares", result())
        uid = PodUid(claim["metadata"]["uid"])
        reference = ClaimReference(uid=uid, namespace=Namespace("default"), name="shares")
        assert agent.claims is not None
        preparing = asyncio.create_task(agent.claims.preparation.prepare(reference))
        await until(lambda: any(request.claim for request in cluster.ledger.requests))

        again = {"devices": {"results": [result(1)]}, "allocationTimestamp": ALLOCATED_AT}
        for allocation in (None, again):
            status = {"status": {"allocation": allocation}}
            claim = cluster.api.store.patch(
                "resourceclaims", "default", "shares", status, subresource="status"
            )
        cluster.ledger.grant(claim_lease(claim, share(1, container="gpu")))

        with pytest.raises(UnavailableError, match="has been allocated again"):
            await preparing
        [device] = await agent.claims.preparation.prepare(reference)
        assert device.device_name == result(1)["device"]
