"""Leases on a real server: what they hold, every operation in each state, and their resizes."""

import asyncio
import random
import time
from dataclasses import replace

import pytest
from msgspec import structs

from shared.ledger.leases import RedisLeases
from shared.ledger.rows.lease_rows import new_lease
from shared.model.budgets.charges import charge_of
from shared.model.budgets.fair_share import GpuAmount
from shared.model.budgets.quota import Quota, QuotaExcess, QuotaLimits
from shared.model.errors import ConflictError, UnavailableError
from shared.model.leases.lease import (
    END_MARGIN_S,
    LIVE,
    TRANSITIONS,
    Lease,
    LeaseState,
    Share,
    ShareSize,
    StaleLeaseError,
    bookings,
    ends_by,
    expected_end,
    reachable,
)
from shared.model.leases.ledger import NoCapacity, Reservation, ReservedLease
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.request import Term
from tests.support.placer.ledger import (
    NOW,
    assert_sound,
    device,
    facts,
    ledger,
    queued,
    refusal,
    report,
    reservation,
    reserve,
    share,
    uses,
    uuid,
    verdict,
)
from tests.support.servers.valkey import valkey_server
from tests.support.waiting import until

RESERVED, BOUND, ACTIVE, RELEASED, EXPIRED = LeaseState
LATER = NOW + 31
PAIRS = [(state, to) for state in LeaseState for to in LeaseState]


async def lease_in(state: LeaseState, leases: RedisLeases) -> Lease:
    """Bring a lease to a state, by the shortest way."""
    [lease] = await reserve(leases, reservation("p", share("a")))
    for step in {
        RESERVED: [],
        BOUND: [BOUND],
        ACTIVE: [BOUND, ACTIVE],
        RELEASED: [RELEASED],
        EXPIRED: [EXPIRED],
    }[state]:
        lease = await moved(lease, step, leases)
    assert lease.state is state
    return lease


async def moved(lease: Lease, to: LeaseState, leases: RedisLeases) -> Lease:
    """Try to move a lease on; return it as it is after that."""
    if to is BOUND:
        await leases.bind([lease])
    elif to is ACTIVE:
        await leases.activate([(lease.pod, lease.node)])
    ended: list[Lease] = []
    if to is RELEASED:
        ended = await leases.release([lease.pod], reason="test")
    elif to is EXPIRED:
        ended = await leases.expire(LATER)
    [stored] = [*ended, *(found for found in await leases.load([lease.pod]) if found)] or [lease]
    return stored


@pytest.mark.parametrize(("state", "to"), [pair for pair in PAIRS if pair[1] is not RESERVED])
async def test_an_operation_moves_a_lease_where_the_table_allows_and_nowhere_else(
    leases: RedisLeases, state: LeaseState, to: LeaseState
) -> None:
    before = await lease_in(state, leases)

    after = await moved(before, to, leases)

    if to in TRANSITIONS[state]:
        assert after.state is to
        assert after.version > before.version
    else:
        assert after == before
    assert bool(await assert_sound(leases)) is (after.state in LIVE)


async def test_a_reservation_is_kept_until_the_instant_to_which_it_is_extended(
    leases: RedisLeases,
) -> None:
    kept, left = await reserve(
        leases, reservation("kept", share("a")), reservation("left", share("a"))
    )

    assert await leases.extend([kept], until=LATER + 10) == [True]
    assert await leases.extend([kept], until=LATER + 5) == [True]
    first = await leases.expire(LATER)
    [stored] = await leases.load([kept.pod])
    second = await leases.expire(LATER + 11)

    assert [lease.pod for lease in first] == [left.pod]
    assert stored == structs.replace(kept, expires_at=LATER + 10), "a shorter time changes nothing"
    assert [lease.pod for lease in second] == [kept.pod]
    assert not await assert_sound(leases)


@pytest.mark.parametrize("state", [state for state in LeaseState if state is not RESERVED])
async def test_only_a_reservation_is_extended(leases: RedisLeases, state: LeaseState) -> None:
    before = await lease_in(state, leases)
    [other] = await reserve(leases, reservation("other", share("a")))
    moved_on = structs.replace(other, version=other.version + 1)

    kept = await leases.extend([before, moved_on, other], until=LATER + 10)

    assert kept == [False, False, True]
    [stored] = await leases.load([before.pod])
    assert stored == (before if state in LIVE else None)


@pytest.mark.parametrize(("state", "to"), [pair for pair in PAIRS if {*pair} <= LIVE])
async def test_a_restored_lease_only_moves_forward_along_the_table(
    leases: RedisLeases, state: LeaseState, to: LeaseState
) -> None:
    before = await lease_in(state, leases)

    assert await leases.restore([structs.replace(before, state=to)], now=NOW) == []

    [after] = await leases.load([before.pod])
    assert after
    assert after.state is (to if to in reachable()[state] else state)
    assert (after == before) is (after.state is state)


async def test_the_end_of_a_lease_is_counted_from_its_activation(leases: RedisLeases) -> None:
    term = Term(max_run_s=60, grace_s=30)
    began = time.time()
    [lease] = await reserve(leases, structs.replace(reservation("p", share("a")), term=term))
    assert ends_by(lease) == NOW + 60 + 30 + END_MARGIN_S

    active = await moved(await moved(lease, BOUND, leases), ACTIVE, leases)
    again = await moved(active, ACTIVE, leases)
    ended = await moved(active, RELEASED, leases)

    assert began - 0.1 < active.activated_at < time.time() + 0.1
    assert ends_by(active) == active.activated_at + 60 + 30 + END_MARGIN_S
    assert again == active
    assert (ended.term, ended.activated_at) == (term, active.activated_at)


@pytest.mark.parametrize(
    ("term", "learned_s", "expected"),
    [
        (Term(), None, None),
        (Term(), 20.0, NOW + 20),
        (Term(max_run_s=60), None, NOW + 60),
        (Term(max_run_s=60), 90.0, NOW + 60),
        (Term(max_run_s=60, expected_run_s=10), 20.0, NOW + 10),
    ],
)
def test_the_expected_end_is_the_authors_then_the_learned_then_the_latest(
    term: Term, learned_s: float | None, expected: float | None
) -> None:
    wanted = structs.replace(reservation("p", share("a")), term=term)
    lease = new_lease(wanted, 1, iter([17, 3, 40]), NOW, NOW + 30)

    assert expected_end(lease, learned_s) == expected


@pytest.mark.parametrize("state", sorted(LIVE))
async def test_a_resize_leaves_the_state_as_it_is(leases: RedisLeases, state: LeaseState) -> None:
    before = await lease_in(state, leases)
    shares = tuple(structs.replace(each, memory_mib=5_000) for each in before.shares)

    after = await leases.resizes.apply(structs.replace(before, shares=shares))

    assert isinstance(after, Lease)
    assert after.state is state


@pytest.mark.nodes(a=1)
async def test_a_refusal_carries_the_totals_of_the_candidates(leases: RedisLeases) -> None:
    await reserve(leases, reservation("p", share("a", mib=10_000, cores=40)))

    full = await refusal(leases, reservation("q", share("a", mib=10_000)))

    assert full.reason == f"a: memory of {uuid('a', 0)}"
    assert full.devices[uuid("a", 0)].memory_mib == 10_000
    assert full.nodes[NodeName("a")].used == {"cpu": 100, "pods": 1}


def held(*shares: Share, tag: str = "") -> list[Reservation]:
    """A pod with each of these shares."""
    return [reservation(f"p{n}", each, tag=tag) for n, each in enumerate(shares)]


@pytest.mark.nodes(a=1, b=1)
@pytest.mark.parametrize(
    ("before", "wanted", "reason"),
    [
        (held(share("a", cores=70)), held(share("a", cores=40)), "cores of GPU-a-0"),
        (held(share("a")), held(share("a", cores=100)), "not-idle of GPU-a-0"),
        (
            held(share("a", cores=100, mib=100)),
            held(share("a", mib=100)),
            "in-exclusive-use of GPU-a-0",
        ),
        (held(), held(share("b")), "device-moved of GPU-b-0"),
        (held(), held(share("z")), "device-unknown of GPU-z-0"),
        (held(*[share("a", mib=1)] * 4), held(share("a", mib=1)), "slots of GPU-a-0"),
        (held(share("a"), tag="red"), held(share("a"), tag="red"), "anti-affinity of GPU-a-0"),
        (held(), [reservation("q", share("a"), cpu=64_001)], "resource:cpu"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_does_not_fit_is_refused(
    leases: RedisLeases, before: list[Reservation], wanted: list[Reservation], reason: str
) -> None:
    await reserve(leases, *before)

    full = await refusal(leases, structs.replace(wanted[0], pod=PodUid("q")))

    assert full.reason == f"a: {reason}"


async def test_a_lease_of_an_earlier_reservation_is_stale(leases: RedisLeases) -> None:
    [lease] = await reserve(leases, reservation("p", share("a")))
    await leases.release([lease.pod], reason="test")
    [gone] = await leases.bind([lease])
    [second] = await reserve(leases, reservation("p", share("a")))

    [stale] = await leases.bind([lease])

    assert isinstance(gone, StaleLeaseError)
    assert gone.stored is None
    assert isinstance(stale, StaleLeaseError)
    assert stale.stored == second.version
    assert await leases.release([lease.pod], reason="old", version=lease.version) == []
    assert await leases.release([lease.pod], reason="new", version=second.version) != []


async def test_all_leases_are_read_page_by_page(leases: RedisLeases) -> None:
    wanted = [reservation(f"p{n}", share("a", mib=1, slotted=False), cpu=1) for n in range(109)]
    await reserve(leases, *wanted)

    found = [lease.pod async for page in leases.load_all() for lease in page]

    assert sorted(found) == sorted(w.pod for w in wanted)


async def test_only_more_room_and_other_reasons_raise_the_capacity_number(
    leases: RedisLeases,
) -> None:
    start = await leases.capacity()
    assert not await leases.save_nodes([facts("a")])
    assert await leases.save_nodes([facts("a", cpu=1)])
    assert await leases.capacity() == start

    await leases.save_nodes([facts("a", cpu=2)])
    more = await leases.capacity()
    unhealthy = [device("a", 0, healthy=False), device("a", 1)]
    assert await leases.save_devices([report("a", unhealthy)]) is not None
    other_reasons = await leases.capacity()
    await leases.save_devices([report("a", [device("a", 0), device("a", 1)])])

    assert start < more < other_reasons < await leases.capacity()


@pytest.mark.nodes(a=1, b=1)
async def test_a_removed_node_is_deleted_with_its_last_lease(leases: RedisLeases) -> None:
    [lease] = await reserve(leases, reservation("p", share("a")))

    assert await leases.remove_node(NodeName("a"))

    await refusal(leases, reservation("q", share("a")))
    assert [node.facts.name for node in (await leases.snapshot()).nodes] == ["b"]
    await assert_sound(leases)
    await leases.release([lease.pod], reason="gone")
    assert list(await uses(leases)) == [uuid("b", 0)]
    await leases.save_nodes([facts("a")])
    await leases.save_devices([report("a", [device("a", 0)])])
    [later] = await reserve(leases, reservation("q", share("a")))
    assert later.shares[0].fence > lease.shares[0].fence


async def test_a_server_that_does_not_run_is_unavailable() -> None:
    async with RedisLeases.connect("redis://:secret@127.0.0.1:1/0") as leases:
        with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1/0 failed") as caught:
            await leases.capacity()

        assert "secret" not in str(caught.value)


async def test_a_server_without_memory_is_unavailable_and_nothing_is_written(url: str) -> None:
    with valkey_server() as small:
        await small.ready()
        async with ledger(small.url) as leases:
            await small.command("CONFIG", "SET", "maxmemory", "1")

            with pytest.raises(UnavailableError, match="maxmemory"):
                await leases.reserve([reservation("p", share("a"))], now=NOW, ttl_s=30)

            await small.command("CONFIG", "SET", "maxmemory", "0")
            assert await assert_sound(leases) == []
            outcomes = await leases.reserve([reservation("p", share("a"))], now=NOW, ttl_s=30)
            assert isinstance(outcomes[0], ReservedLease)


async def test_an_expired_reservation_is_not_taken_for_a_later_one_of_the_same_fence(
    leases: RedisLeases,
) -> None:
    [first] = await reserve(leases, reservation("p", share("a", 0)))
    await leases.expire(NOW + 60)
    [second] = await reserve(leases, reservation("p", share("a", 1)))
    assert first.shares[0].fence == second.shares[0].fence
    [bound] = await leases.bind([second])
    assert isinstance(bound, Lease)

    [late] = await leases.bind([first])
    [[_, reason]] = await leases.restore([first], now=NOW)

    assert isinstance(late, StaleLeaseError)
    assert reason == "the pod has another lease"


TEAM = Namespace("default")


async def running(leases: RedisLeases, pod: str = "p", mib: int = 4_000, gpu: int = 0) -> Lease:
    """Return the lease of a pod that runs."""
    [lease] = await reserve(leases, reservation(pod, share("a", gpu, mib)))
    await leases.bind([lease])
    [active] = await leases.activate([(lease.pod, lease.node)])
    assert active is not None
    return active


def sized(lease: Lease, mib: int, cores: int = 0) -> Lease:
    was = ShareSize(
        memory_mib=lease.shares[0].memory_mib, cores_percent=lease.shares[0].cores_percent
    )
    return structs.replace(
        lease,
        shares=tuple(
            structs.replace(
                each, memory_mib=mib, cores_percent=cores, requested_size=each.requested_size or was
            )
            for each in lease.shares
        ),
    )


async def assert_fair_share(leases: RedisLeases) -> None:
    """Check that what namespaces are counted to hold is what their leases take."""
    held = await assert_sound(leases)
    taken = [booking for lease in held for booking in bookings(lease.shares)]
    summed = GpuAmount(
        cores_percent=sum(each.cores_percent for each in taken),
        memory_mib=sum(each.memory_mib for each in taken),
    )
    assert (await leases.totals.fair_share()).used.get(TEAM, GpuAmount()) == summed


async def test_a_lease_keeps_its_slot_and_fence_and_rises_in_version(leases: RedisLeases) -> None:
    before = await running(leases)

    after = await leases.resizes.apply(sized(before, 6_000, 30))

    assert isinstance(after, Lease)
    assert after.shares == sized(before, 6_000, 30).shares
    assert after == structs.replace(
        before, shares=after.shares, version=after.version, resized_at=after.resized_at
    )
    assert after.version > before.version
    assert after.resized_at * 1000 == round(after.resized_at * 1000)
    assert await leases.load([before.pod]) == [after]
    assert await assert_sound(leases) == [after]
    again = await leases.resizes.apply(sized(after, 2_000))
    assert isinstance(again, Lease)
    assert again.resized_at > after.resized_at
    assert again.shares[0].requested_size == ShareSize(memory_mib=4_000, cores_percent=0)
    assert await assert_sound(leases) == [again]
    await assert_fair_share(leases)


async def test_a_size_that_does_not_fit_changes_nothing(leases: RedisLeases) -> None:
    lease = await running(leases)
    await running(leases, "q", 9_000)

    too_much = await leases.resizes.apply(sized(lease, 7_001))
    too_many = await leases.resizes.apply(sized(lease, 4_000, 101))
    fits = await leases.resizes.apply(sized(lease, 7_000, 100))

    assert isinstance(too_much, NoCapacity)
    assert too_much.reason == f"memory of {uuid('a', 0)}"
    assert too_much.devices[uuid("a", 0)].memory_mib == 13_000
    assert isinstance(too_many, NoCapacity)
    assert too_many.reason.startswith("a field is out of bounds: ")
    assert isinstance(fits, Lease)
    await assert_sound(leases)


async def test_a_lease_on_an_unhealthy_device_can_shrink_and_not_grow(leases: RedisLeases) -> None:
    lease = await running(leases)
    unhealthy = replace(device("a", 0), healthy=False)
    await leases.save_devices([report("a", [unhealthy, device("a", 1)], at=1.0)])

    more = await leases.resizes.apply(sized(lease, 5_000))
    less = await leases.resizes.apply(sized(lease, 3_000))

    assert isinstance(more, NoCapacity)
    assert more.reason.startswith("device-unhealthy")
    assert isinstance(less, Lease)


async def test_the_sizes_of_several_shares_change_together(leases: RedisLeases) -> None:
    [lease] = await reserve(leases, reservation("p", share("a", 0), share("a", 1), share("a", 1)))
    await leases.bind([lease])
    [active] = await leases.activate([(lease.pod, lease.node)])
    assert active is not None
    await running(leases, "q", 4_000, gpu=1)

    refused = await leases.resizes.apply(sized(active, 6_001))
    done = await leases.resizes.apply(sized(active, 6_000))

    assert isinstance(refused, NoCapacity)
    assert isinstance(done, Lease)
    taken = await uses(leases)
    assert [taken[uuid("a", gpu)].memory_mib for gpu in (0, 1)] == [6_000, 16_000]
    await assert_sound(leases)


async def test_a_resize_of_a_stale_or_ended_lease_changes_nothing(leases: RedisLeases) -> None:
    lease = await running(leases)
    await leases.resizes.apply(sized(lease, 5_000))

    stale = await leases.resizes.apply(sized(lease, 6_000))
    await leases.release([lease.pod], reason="over")
    ended = await leases.resizes.apply(sized(lease, 6_000))

    assert isinstance(stale, StaleLeaseError)
    assert stale.stored
    assert isinstance(ended, StaleLeaseError)
    assert ended.stored is None
    assert await assert_sound(leases) == []


async def test_a_lease_shrinks_only_while_its_lock_is_held(leases: RedisLeases) -> None:
    lease = await running(leases)
    token = await leases.resizes.lock(lease.pod, ttl_s=1)
    assert token is not None
    assert await leases.resizes.lock(lease.pod, ttl_s=60) is None
    other = await until(lambda: leases.resizes.lock(lease.pod, ttl_s=60))

    with pytest.raises(ConflictError, match="has expired"):
        await leases.resizes.apply(sized(lease, 3_000), token=token)
    await leases.resizes.unlock(lease.pod, token)
    done = await leases.resizes.apply(sized(lease, 3_000), token=other)

    assert isinstance(done, Lease)
    assert await leases.resizes.lock(lease.pod, ttl_s=60), "what was done ends the turn"


async def test_of_twenty_concurrent_resizes_of_one_lease_one_succeeds(leases: RedisLeases) -> None:
    lease = await running(leases)

    answers = await asyncio.gather(
        *(leases.resizes.apply(sized(lease, 1_000 + 500 * n)) for n in range(20))
    )

    (done,) = (each for each in answers if isinstance(each, Lease))
    assert sum(isinstance(each, StaleLeaseError) for each in answers) == 19
    assert await assert_sound(leases) == [done]


async def test_twenty_writers_that_resize_reserve_and_release_never_over_commit(
    leases: RedisLeases,
) -> None:
    async def write(writer: int) -> None:
        chance = random.Random(writer)  # noqa: S311
        for step in range(8):
            wanted = reservation(f"{writer}-{step}", share("a", chance.randint(0, 1), 2_000))
            [outcome] = await leases.reserve([wanted], now=NOW, ttl_s=30)
            if not isinstance(outcome, ReservedLease):
                continue
            await leases.bind([outcome.lease])
            [lease] = await leases.activate([(outcome.lease.pod, outcome.lease.node)])
            for _ in range(3):
                assert lease is not None
                changed = await leases.resizes.apply(
                    sized(lease, chance.choice([500, 3_000, 9_000]), chance.choice([0, 40]))
                )
                lease = changed if isinstance(changed, Lease) else lease
            if chance.random() < 0.7:
                await leases.release([outcome.lease.pod], reason="test")

    async with asyncio.TaskGroup() as tasks:
        for writer in range(20):
            tasks.create_task(write(writer))

    for use in (await uses(leases)).values():
        assert use.memory_mib <= 16_000
        assert use.cores_percent <= 100
    await assert_fair_share(leases)


async def test_what_a_smaller_lease_frees_is_offered_to_waiting_pods(leases: RedisLeases) -> None:
    lease = await running(leases, mib=15_000)
    await running(leases, "q", 15_000, gpu=1)
    waiting = queued("w", units=8_000)
    await leases.waiting_pods.enqueue([verdict(waiting, await leases.capacity())])
    assert not (await leases.waiting_pods.choose_offers(now=NOW)).pods

    await leases.resizes.apply(sized(lease, 8_000))

    assert [pod.pod for pod in (await leases.waiting_pods.choose_offers(now=NOW)).pods] == ["w"]


async def test_a_quota_counts_the_new_size(leases: RedisLeases) -> None:
    quota = Quota(namespace=TEAM, limits=QuotaLimits(memory_mib=6_000))
    await leases.quotas.save([quota], read_at=NOW)
    lease = await running(leases)

    over = await leases.resizes.apply(sized(lease, 6_001))
    within = await leases.resizes.apply(sized(lease, 6_000))

    assert isinstance(over, NoCapacity)
    assert over.reason == "quota"
    assert over.quotas == (QuotaExcess(measure="memoryMiB", limit=6_000, used=0, requested=6_001),)
    assert isinstance(within, Lease)
    accounts = await leases.quotas.totals()
    assert accounts.used[TEAM][""] == charge_of(within.shares, {uuid("a", 0): 16_000})
    assert accounts.charges[lease.pod] == (TEAM, {"": accounts.used[TEAM][""]})


async def test_a_lease_can_shrink_while_its_namespace_exceeds_its_quota(
    leases: RedisLeases,
) -> None:
    lease = await running(leases)
    quota = Quota(namespace=TEAM, limits=QuotaLimits(memory_mib=1_000, cores_milli=500))
    await leases.quotas.save([quota], read_at=NOW)

    less = await leases.resizes.apply(sized(lease, 3_000, 20))

    assert isinstance(less, Lease)
    held = (await leases.quotas.totals()).used[TEAM][""]
    assert (held.memory_mib, held.cores_milli) == (3_000, 200)


async def test_resized_leases_are_unsynced_until_their_last_size_is_applied(
    leases: RedisLeases,
) -> None:
    first = await leases.resizes.apply(sized(await running(leases), 5_000))
    assert isinstance(first, Lease)
    second = await leases.resizes.apply(sized(first, 6_000))
    assert isinstance(second, Lease)

    assert await leases.resizes.unsynced(older_than_s=3600) == []
    assert not await leases.resizes.set_synced(first.pod, first.version)
    assert await leases.resizes.unsynced(older_than_s=0) == [first.pod]
    assert await leases.resizes.set_synced(first.pod, second.version)
    assert await leases.resizes.unsynced(older_than_s=0) == []


async def test_a_rebuild_restores_the_new_size(leases: RedisLeases) -> None:
    lease = await leases.resizes.apply(sized(await running(leases), 5_000))
    assert isinstance(lease, Lease)
    token = await leases.begin_rebuild(now=NOW + 5, force=True)
    assert token

    assert await leases.restore([lease], now=NOW + 5, token=token) == []
    await leases.resizes.set_unsynced([lease])
    assert await leases.finish_rebuild(token)

    assert await leases.load([lease.pod]) == [lease]
    assert await leases.resizes.unsynced(older_than_s=0) == [lease.pod]
