"""Claims that are leased in their scheduler's own write, and claims whose leases Redis has lost."""

import asyncio
import json
from dataclasses import replace

import pytest
from msgspec import structs

from services.binder.ledger_sync.lease_holders import holders_in
from services.binder.ledger_sync.recovery import Recovery
from services.claims import claim_leaser
from services.claims.claim_combinations import MOST_COMBINED
from services.claims.claim_leaser import RESERVATION_S, WRITTEN_S
from services.claims.clients import RequestUse
from shared.model.errors import UnavailableError
from shared.model.events.claim_events import AllocatedClaim, AllocatedDevice, ClaimDeallocated
from shared.model.events.node_events import LeaseHolder
from shared.model.events.pod_events import LeaseChanged, ListedPods, PodsListed
from shared.model.events.request_reply import ClaimLeaseReply, ClaimRestoreRequest
from shared.model.leases.lease import ClaimAllocation, Lease, LeaseState
from shared.model.leases.lease_copy import copy_of, dump_lease, load_lease
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.claim import LEASED, REFUSED
from shared.pods.pod_snapshot import generation_of
from tests.support.binder.claim_binder import GPU, ClaimBinder
from tests.support.binder.events import activation, in_state
from tests.support.binder.world import NewWorld, allocated, lease, on
from tests.support.placer.ledger import assert_sound, uuid

UNDECIDED = ClaimLeaseReply()


async def test_an_allocation_is_leased_before_it_is_written_and_needs_no_other_answer(
    binder: ClaimBinder,
) -> None:
    parts = (on(GPU, 4_000, share_id="s1"), on(uuid("a", 1), 2_000, request="two", share_id="s2"))
    claim = replace(allocated("c", *parts), consumers=(PodUid("p"),))

    reply = await binder.admit(claim)

    reserved = await binder.held(claim)
    assert reserved.state is LeaseState.RESERVED
    assert binder.bus.published == []
    entries = list(map(json.loads, reply.devices))
    assert [
        (each["pool"], each["device"], each["shareID"], each["conditions"][0]["type"])
        for each in entries
    ] == [("a", "gpu-a-0", "s1", LEASED), ("a", "gpu-a-1", "s2", LEASED)]
    assert entries[0]["data"] | {"resized_at": 0.0} == json.loads(json.dumps(copy_of(reserved)))
    assert "data" not in entries[1]
    # The API server counts each byte of the data.
    assert reply.devices[0] == json.dumps(entries[0], separators=(",", ":"))
    await binder.lease(binder.write(claim, reply))
    assert binder.answered(claim) == []
    lease = await binder.held(claim)
    assert (lease.state, lease.shares) == (LeaseState.BOUND, reserved.shares)
    assert binder.bus.published == [LeaseChanged(lease=lease)]
    assert await assert_sound(binder.ledger) == [lease]


async def test_a_repeated_request_gets_the_same_lease(binder: ClaimBinder) -> None:
    other = ClaimBinder(binder.ledger, claims=binder.claims, agents=binder.agents)
    claim = allocated("c", on(GPU))

    replies = [await binder.admit(claim), await other.admit(claim)]
    replies += await asyncio.gather(binder.admit(claim), other.admit(claim))

    copies = [json.loads(each.devices[0])["data"] for each in replies]
    assert len({(each["version"], json.dumps(each["shares"])) for each in copies}) == 1
    assert len(await assert_sound(binder.ledger)) == 1


async def test_of_two_claims_for_the_last_share_one_is_refused_after_the_slices_are_lowered(
    binder: ClaimBinder,
) -> None:
    other = ClaimBinder(binder.ledger, claims=binder.claims, agents=binder.agents)
    claims = [allocated(name, on(GPU, 9_000)) for name in ("c", "d")]

    replies = await asyncio.gather(binder.admit(claims[0]), other.admit(claims[1]))

    [refusal] = [each.refusal for each in replies if each.refusal]
    assert "has 7000 MiB" in refusal
    assert "it is leased to claim default/" in refusal
    assert binder.agents.slices == ["a"]
    assert [bool(each.devices) for each in replies].count(True) == 1
    assert len(await assert_sound(binder.ledger)) == 1


async def test_the_reservation_of_an_allocation_that_was_not_written_ends(
    binder: ClaimBinder,
) -> None:
    unwritten = allocated("c", on(GPU))
    written = allocated("d", on(GPU))
    binder.write(written, await binder.admit(written))
    await binder.admit(unwritten)

    assert await binder.leaser.end_unwritten_claims() == []
    binder.clock.advance(WRITTEN_S)
    ended = await binder.leaser.end_unwritten_claims()

    assert [lease.lease.pod for lease in ended] == [unwritten.claim]
    assert (await binder.held(written)).state is LeaseState.BOUND, "its event is late"
    assert await binder.leaser.end_unwritten_claims() == []


async def test_an_unwritten_allocation_that_cannot_be_read_keeps_no_other_and_is_tried_again(
    binder: ClaimBinder,
) -> None:
    unread = allocated("c", on(GPU))
    other = allocated("d", on(GPU))
    for claim in (unread, other):
        await binder.admit(claim)
    binder.clock.advance(WRITTEN_S)
    binder.claims.silent.add(unread.name)

    ended = await binder.leaser.end_unwritten_claims()

    assert [change.lease.pod for change in ended] == [other.claim]
    binder.claims.silent.clear()
    ended = await binder.leaser.end_unwritten_claims()
    assert [change.lease.pod for change in ended] == [unread.claim]


async def test_the_reservation_of_an_unwritten_allocation_ends_without_the_binder_that_made_it(
    binder: ClaimBinder,
) -> None:
    claim = allocated("c", on(GPU))
    await binder.admit(claim)

    assert await binder.ledger.expire(binder.clock.now() + RESERVATION_S + 1)

    assert await binder.lease_of(claim) is None


async def test_a_namespace_has_few_reservations_of_unwritten_allocations_and_all_have_not_many(
    binder: ClaimBinder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim_leaser, "MOST_UNWRITTEN_OF_NAMESPACE", 2)
    monkeypatch.setattr(claim_leaser, "MOST_UNWRITTEN", 3)
    own = [allocated(f"c{number}", on(GPU, 100)) for number in range(3)]
    others = [
        replace(allocated(f"d{number}", on(GPU, 100)), namespace=Namespace("other"))
        for number in range(2)
    ]

    replies = [await binder.admit(claim) for claim in (*own, *others)]

    assert [bool(each.devices) for each in replies] == [True, True, False, True, False]
    assert (await binder.admit(own[0])).devices, "it has one"
    await binder.lease(binder.write(own[0], replies[0]))
    assert (await binder.admit(own[2])).devices, "one of them is written"
    assert await binder.admit(others[1]) == UNDECIDED


async def test_a_claim_that_is_prepared_before_the_event_of_its_write_is_leased_for_it(
    binder: ClaimBinder,
) -> None:
    claim = allocated("c", on(GPU))
    binder.write(claim, await binder.admit(claim))

    await binder.leaser.restore(holder(claim), claim.node)

    assert (await binder.held(claim)).state is LeaseState.BOUND


async def test_the_reservation_of_an_unwritten_allocation_is_not_leased_for_any_node(
    binder: ClaimBinder,
) -> None:
    claim = allocated("c", on(GPU))
    await binder.admit(claim)

    await binder.leaser.restore(holder(claim), claim.node)

    assert (await binder.held(claim)).state is LeaseState.RESERVED


async def test_a_scheduler_that_tries_again_gets_a_lease_on_what_it_allocates_then(
    binder: ClaimBinder,
) -> None:
    first = allocated("c", on(GPU))
    second = allocated("c", on(uuid("a", 1), 5_000), generation="g2")
    await binder.admit(first)

    reply = await binder.admit(second)

    lease = await binder.held(second)
    assert [each.device for each in lease.shares] == [uuid("a", 1)]
    binder.write(second, reply)
    binder.clock.advance(WRITTEN_S)
    assert await binder.leaser.end_unwritten_claims() == []
    bound = await binder.held(second)
    assert (bound.state, bound.shares) == (LeaseState.BOUND, lease.shares)


async def test_a_claim_that_is_still_prepared_is_decided_after_the_write(
    binder: ClaimBinder,
) -> None:
    first, second = allocated("c", on(GPU)), allocated("c", on(GPU, 5_000), generation="g2")
    await binder.lease(binder.write(first, await binder.admit(first)))
    assert await binder.admit(second) == UNDECIDED, "the first allocation is still there"
    binder.claims.stored.clear()
    binder.agents.answers[first.claim] = False

    assert await binder.admit(second) == UNDECIDED

    lease = await binder.held(first)
    assert generation_of(lease) == "g1"


async def test_what_cannot_be_read_is_decided_after_the_write(binder: ClaimBinder) -> None:
    claim = replace(allocated("c", on(GPU)), consumers=(PodUid("p"),), consumer_names=("pod",))
    binder.claims.unreadable.append(UnavailableError("no answer"))

    assert await binder.admit(claim) == UNDECIDED
    assert (await binder.admit(claim)).devices


async def test_administrative_access_is_answered_without_a_lease(binder: ClaimBinder) -> None:
    claim = replace(allocated("c"), admin_devices=(on(GPU, None, request="admin"),))

    reply = await binder.admit(claim)

    [entry] = map(json.loads, reply.devices)
    assert entry["conditions"][0]["type"] == LEASED
    assert "data" not in entry
    assert await binder.lease_of(claim) is None


def used(*uses: tuple[str, str], container: str = "main") -> list[RequestUse]:
    return [RequestUse(container=container, claim=claim, request=name) for claim, name in uses]


def by_pod(claim: AllocatedClaim) -> AllocatedClaim:
    return replace(claim, consumers=(PodUid("uid-pod"),), consumer_names=("pod",))


TWO = (on(GPU, 4_000, request="one"), on(GPU, 5_000, request="two"))
ADMIN = on(GPU, None, request="admin")


@pytest.mark.parametrize(
    ("uses", "named"),
    [
        ([("c", "")], "request one of ResourceClaim c and request two of ResourceClaim c"),
        ([("c", "one"), ("c", "two")], "request one of ResourceClaim c and request two"),
        ([("c", "one"), ("other", "")], "request gpu of ResourceClaim other"),
        ([("c", "one"), ("admin", "")], "request admin of ResourceClaim admin"),
        ([("c", "two"), ("", "nvidia.com/gpu")], "nvidia.com/gpu and request two"),
    ],
)
async def test_a_claim_is_refused_if_a_container_combines_limits(
    binder: ClaimBinder, uses: list[tuple[str, str]], named: str
) -> None:
    binder.claims.put(by_pod(allocated("other", on(GPU, 1_000))))
    binder.claims.put(by_pod(replace(allocated("admin"), admin_devices=(ADMIN,))))
    claim = binder.claims.put(by_pod(allocated("c", *TWO)))
    binder.claims.uses["pod"] = used(*uses)

    await binder.lease(claim)

    [answer] = binder.claims.answers["c"]
    assert answer.condition == REFUSED
    assert named in answer.message
    assert "in container main of pod default/pod: use one request of gpu" in answer.message
    assert await binder.lease_of(claim) is None


WHOLE = (on(GPU, None, request="a/best"), on(uuid("a", 1), None, request="b"))


@pytest.mark.parametrize(
    ("devices", "uses"),
    [
        pytest.param(
            TWO, used(("c", "one")) + used(("c", "two"), container="second"), id="one each"
        ),
        pytest.param(WHOLE, used(("c", ""), ("c", "a")), id="several whole devices"),
    ],
)
async def test_requests_that_no_container_combines_with_limits_are_leased(
    binder: ClaimBinder, devices: tuple[AllocatedDevice, ...], uses: list[RequestUse]
) -> None:
    claim = binder.claims.put(by_pod(allocated("c", *devices)))
    binder.claims.uses["pod"] = uses

    await binder.lease(claim)

    assert binder.answered(claim) == [LEASED]


async def test_claims_of_one_container_are_read_once_for_all_of_them(binder: ClaimBinder) -> None:
    claims = [by_pod(allocated(f"c{n}", on(GPU, 100 + n))) for n in range(MOST_COMBINED + 1)]
    for claim in claims:
        binder.claims.put(claim)
    binder.claims.uses["pod"] = used(*((claim.name, "") for claim in claims))

    await binder.lease(*claims)

    assert {answer.condition for [answer] in binder.claims.answers.values()} == {REFUSED}
    assert max(binder.claims.reads.values()) == 1


async def test_a_claim_beside_too_many_others_in_a_container_is_refused_without_reading_them(
    binder: ClaimBinder,
) -> None:
    claim = binder.claims.put(by_pod(allocated("c", on(GPU))))
    others = [(f"other-{number}", "") for number in range(MOST_COMBINED + 1)]
    binder.claims.uses["pod"] = used(("c", ""), *others)

    await binder.lease(claim)

    [answer] = binder.claims.answers["c"]
    assert answer.condition == REFUSED
    assert "use 33 other ResourceClaims beside c; at most 32" in answer.message
    assert binder.claims.reads["other-0"] == 0


async def test_a_pod_that_cannot_be_read_is_read_again(binder: ClaimBinder) -> None:
    claim = binder.claims.put(by_pod(allocated("c", *TWO)))
    binder.claims.unreadable.append(UnavailableError("no API server"))

    with pytest.raises(UnavailableError, match="the pods of ResourceClaim default/c: no API"):
        await binder.lease(claim)
    assert binder.answered(claim) == []
    await binder.lease(claim)

    assert binder.answered(claim) == [LEASED]


def holder(claim: AllocatedClaim) -> LeaseHolder:
    return LeaseHolder(pod=claim.claim, namespace=claim.namespace, name=claim.name, claim=True)


async def lose_and_lease(binder: ClaimBinder, lost_mib: int, other_mib: int) -> None:
    """Lease claim `lost`, lose its lease, and give its slot to claim `other`."""
    lost = await binder.leased("lost", lost_mib)
    await binder.ledger.release([lost.claim], reason="its write was lost")
    await binder.leased("other", other_mib)


@pytest.mark.parametrize(("node", "is_restored"), [("a", True), ("b", False)])
async def test_a_lost_lease_is_back_as_soon_as_the_claims_node_prepares_it(
    binder: ClaimBinder, node: str, is_restored: bool
) -> None:
    claim = await binder.leased()
    before = await binder.held(claim)
    await binder.ledger.release([claim.claim], reason="its write was lost")
    prepared = holder(claim)

    request = ClaimRestoreRequest(node=NodeName(node), claim=prepared)
    reply = await binder.leaser.restore_lease(request)

    after = await binder.lease_of(claim)
    assert (after.shares if after else None) == (before.shares if is_restored else None)
    assert reply.leases == ((after,) if after else ())
    assert binder.answered(claim) == [LEASED]
    await assert_sound(binder.ledger)


@pytest.mark.parametrize(("node", "survives"), [("a", True), ("b", False)])
async def test_a_lease_of_a_claim_that_its_node_prepares_survives_an_end_that_was_decided_before(
    binder: ClaimBinder, node: str, survives: bool
) -> None:
    """A binder was told that the claim is not prepared, and its write comes late."""
    claim = await binder.leased()
    before = await binder.held(claim)
    prepared = holder(claim)
    await binder.leaser.restore(prepared, NodeName(node))

    ended = await binder.leaser.ender.release(before)

    after = await binder.lease_of(claim)
    assert bool(ended) is not survives
    assert ((after.shares, after.claim) if after else None) == (
        (before.shares, before.claim) if survives else None
    )


async def test_an_unprepared_claim_gets_a_newer_lease_than_the_one_that_its_agent_saw_end(
    binder: ClaimBinder,
) -> None:
    """An agent ignores leases that are older than what it has received."""
    claim = await binder.leased()
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
    answered = binder.claims.stored["c"]
    before = await binder.lease_of(second)
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
    lost = binder.claims.stored["lost"]
    other = binder.claims.stored["other"]
    binder.agents.answers[lost.claim] = True

    for _ in range(2):
        await binder.lease(binder.claims.stored["lost"])

    again = await binder.held(lost)
    beside = await binder.held(other)
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

    assert await world.binder.reconciler.reconcile_listing([listing(CLAIM)]) == []


@pytest.mark.parametrize("found", [None, replace(CLAIM, generation="g2")])
async def test_a_lease_whose_allocation_is_gone_ends_as_a_claims(
    new_world: NewWorld,
    found: AllocatedClaim | None,
) -> None:
    world = await new_world(HELD)
    listed = [found] if found else []
    if found:
        world.claims.put(found)

    (event,) = await world.binder.reconciler.reconcile_listing([listing(*listed)])

    assert isinstance(event, ClaimDeallocated)
    assert (event.claim, event.generation) == (HELD.pod, "g1")


async def test_a_claim_that_was_allocated_after_the_listing_keeps_its_lease(
    new_world: NewWorld,
) -> None:
    world = await new_world(HELD)
    world.claims.put(CLAIM)

    assert await world.binder.reconciler.reconcile_listing([listing()]) == []


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
