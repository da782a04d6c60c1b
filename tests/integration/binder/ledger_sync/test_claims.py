"""Leases of ResourceClaims are compared with listings, and restored, by their allocation."""

from dataclasses import replace

import pytest
from msgspec import structs

from services.binder.ledger_sync.lease_holders import holders_in
from services.binder.ledger_sync.recovery import Recovery
from shared.model.events.claim_events import AllocatedClaim, ClaimDeallocated
from shared.model.events.pod_events import ListedPods, PodsListed
from shared.model.lease import ClaimAllocation, Lease, LeaseState
from shared.model.lease_copy import dump_lease
from tests.support.binder.claims import allocated, on
from tests.support.binder.events import activation, in_state
from tests.support.binder.world import NewWorld, lease

HELD = structs.replace(
    in_state(LeaseState.ACTIVE, "c"), claim=ClaimAllocation(generation="g1"), expires_at=0.0
)
CLAIM = replace(allocated("c", on(HELD.shares[0].device), node=HELD.node), lease=dump_lease(HELD))


def listing(*claims: AllocatedClaim) -> PodsListed:
    return PodsListed(listing_id="l1", chunk=0, chunks=1, pods=ListedPods(claims=claims))


async def test_the_lease_of_a_listed_claim_stays(new_world: NewWorld) -> None:
    world = await new_world(HELD)

    assert await world.binder.reconcile_listing([listing(CLAIM)]) == []


@pytest.mark.parametrize("found", [None, replace(CLAIM, generation="g2")])
async def test_a_lease_whose_allocation_is_gone_ends_as_a_claims(
    new_world: NewWorld,
    found: AllocatedClaim | None,
) -> None:
    world = await new_world(HELD)
    listed = [found] if found else []
    if found:
        world.claims.put(found)

    (event,) = await world.binder.reconcile_listing([listing(*listed)])

    assert isinstance(event, ClaimDeallocated)
    assert (event.claim, event.generation) == (HELD.pod, "g1")


async def test_a_claim_that_was_allocated_after_the_listing_keeps_its_lease(
    new_world: NewWorld,
) -> None:
    world = await new_world(HELD)
    world.claims.put(CLAIM)

    assert await world.binder.reconcile_listing([listing()]) == []


def recovered(claim: AllocatedClaim, *active: Lease) -> tuple[list[Lease], int]:
    recovery = Recovery(holders_in(ListedPods(claims=(claim,))))
    reported = recovery.add_reports({HELD.node: tuple(map(activation, active))})
    leases = [each.lease for each in reported]
    leases += [lease for page in recovery.annotated() for lease in page]
    return leases, len(recovery.problems)


def test_a_lease_is_recovered_from_the_claims_status() -> None:
    bound = structs.replace(HELD, state=LeaseState.BOUND)

    assert recovered(CLAIM) == ([bound], 0)


def test_what_the_agent_has_prepared_comes_before_the_copy() -> None:
    prepared = structs.replace(HELD, version=9, expires_at=0.0)

    assert recovered(CLAIM, prepared) == ([prepared], 0)


@pytest.mark.parametrize(
    "copy", [dump_lease(lease("c")), dump_lease(structs.replace(HELD, pod=lease("d").pod)), "{}"]
)
def test_a_copy_of_anything_else_is_not_restored(copy: str) -> None:
    assert recovered(replace(CLAIM, lease=copy)) == ([], 1)
    assert recovered(replace(CLAIM, generation="g2")) == ([], 1)
