"""Claims that were answered, and whose leases Redis has lost unseen."""

import json
from dataclasses import replace

import pytest
from msgspec import structs

from services.binder.ledger_sync.lease_holders import holders_in
from services.binder.ledger_sync.recovery import Recovery
from shared.model.claim import LEASED, REFUSED
from shared.model.events.claim_events import AllocatedClaim, ClaimDeallocated
from shared.model.events.node_events import LeaseHolder
from shared.model.events.pod_events import ListedPods, PodsListed
from shared.model.events.request_reply import LeasesRequest
from shared.model.lease import ClaimAllocation, Lease, LeaseState
from shared.model.lease_copy import dump_lease, load_lease
from shared.model.names import NodeName
from tests.support.binder.claim_binder import GPU, ClaimBinder
from tests.support.binder.events import activation, in_state
from tests.support.binder.world import NewWorld, allocated, lease, on
from tests.support.placer.ledger import assert_sound


def holder(claim: AllocatedClaim) -> LeaseHolder:
    return LeaseHolder(pod=claim.claim, namespace=claim.namespace, name=claim.name, claim=True)


async def lose_and_lease(binder: ClaimBinder, lost_mib: int, other_mib: int) -> None:
    """Lease claim `lost`, lose its lease, and give its slot to claim `other`."""
    lost = binder.claims.put(allocated("lost", on(GPU, lost_mib)))
    await binder.lease(lost)
    await binder.ledger.release([lost.claim], reason="its write was lost")
    other = binder.claims.put(allocated("other", on(GPU, other_mib)))
    await binder.lease(other)


@pytest.mark.parametrize(("node", "is_restored"), [("a", True), ("b", False)])
async def test_a_lost_lease_is_back_as_soon_as_the_claims_node_prepares_it(
    binder: ClaimBinder, node: str, is_restored: bool
) -> None:
    claim = binder.claims.put(allocated("c", on(GPU)))
    await binder.lease(claim)
    before = await binder.held(claim)
    await binder.ledger.release([claim.claim], reason="its write was lost")
    prepared = holder(claim)

    request = LeasesRequest(node=NodeName(node), pods=(claim.claim,), claim=prepared)
    await binder.binder.list_leases(request)

    after = await binder.lease_of(claim)
    assert (after.shares if after else None) == (before.shares if is_restored else None)
    assert binder.answered(claim) == [LEASED]
    await assert_sound(binder.ledger)


async def test_a_lease_of_a_claim_that_is_prepared_survives_an_end_that_was_decided_before(
    binder: ClaimBinder,
) -> None:
    """A binder was told that the claim is not prepared, and its write comes late."""
    claim = binder.claims.put(allocated("c", on(GPU)))
    await binder.lease(claim)
    before = await binder.held(claim)
    prepared = holder(claim)
    await binder.leaser.restore(prepared, NodeName("a"))

    ended = await binder.leaser.ender.release(before)

    after = await binder.held(claim)
    assert ended == []
    assert (after.shares, after.claim) == (before.shares, before.claim)


async def test_an_unprepared_claim_gets_a_newer_lease_than_the_one_that_its_agent_saw_end(
    binder: ClaimBinder,
) -> None:
    """An agent ignores leases that are older than what it has received."""
    claim = binder.claims.put(allocated("c", on(GPU)))
    await binder.lease(claim)
    [ended] = await binder.ledger.release([claim.claim], reason="its node refused the pod")
    binder.agents.answers[claim.claim] = True
    prepared = holder(claim)

    await binder.leaser.restore(prepared, NodeName("a"))

    again = await binder.held(claim)
    assert again.version > ended.version
    copy = json.dumps(binder.claims.answers["c"][-1].lease)
    shown = load_lease(copy, namespace=claim.namespace, name=claim.name)
    assert shown.shares == again.shares


async def test_a_lost_lease_replaces_that_of_an_earlier_allocation_which_came_back(
    binder: ClaimBinder,
) -> None:
    """The claim is prepared, with the later one."""
    first, second = allocated("c", on(GPU)), allocated("c", on(GPU, 5_000), generation="g2")
    await binder.lease(binder.claims.put(second))
    answered, before = binder.claims.stored["c"], await binder.lease_of(second)
    await binder.ledger.release([second.claim], reason="Redis was rolled back")
    await binder.lease(binder.claims.put(first))
    binder.claims.put(answered)
    binder.agents.answers[first.claim] = False

    await binder.lease(answered)

    after = await binder.held(second)
    assert before
    assert (after.shares, after.claim) == (before.shares, before.claim)
    await assert_sound(binder.ledger)


async def test_an_unprepared_claim_gets_another_slot_if_its_own_has_gone(
    binder: ClaimBinder,
) -> None:
    await lose_and_lease(binder, 4_000, 4_000)
    lost, other = binder.claims.stored["lost"], binder.claims.stored["other"]
    binder.agents.answers[lost.claim] = True

    for _ in range(2):
        await binder.lease(binder.claims.stored["lost"])

    again, beside = await binder.held(lost), await binder.held(other)
    assert [each.slot for each in (*beside.shares, *again.shares)] == [0, 1]
    first, second = binder.claims.answers["lost"]
    assert (first.condition, second.condition) == (LEASED, LEASED)
    copy = load_lease(json.dumps(second.lease), namespace=lost.namespace, name=lost.name)
    assert copy.shares == again.shares
    await assert_sound(binder.ledger)


async def test_a_prepared_claim_is_left_to_the_records_of_its_agent(binder: ClaimBinder) -> None:
    await lose_and_lease(binder, 4_000, 4_000)
    lost = binder.claims.stored["lost"]
    binder.agents.answers[lost.claim] = False

    await binder.lease(lost)

    assert await binder.lease_of(lost) is None
    assert binder.answered(lost) == [LEASED]


async def test_an_unprepared_claim_is_refused_if_its_memory_has_gone(binder: ClaimBinder) -> None:
    await lose_and_lease(binder, 9_000, 9_000)
    lost = binder.claims.stored["lost"]
    binder.agents.answers[lost.claim] = True

    await binder.lease(lost)

    assert await binder.lease_of(lost) is None
    assert binder.answered(lost) == [LEASED, REFUSED]


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
