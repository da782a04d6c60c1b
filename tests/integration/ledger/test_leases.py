"""Leases on a real server: what they hold, and every operation in each of their states."""

import time
from dataclasses import replace

import pytest
from msgspec import structs

from shared.ledger.leases import RedisLeases
from shared.ledger.rows.lease_rows import new_lease
from shared.ledger.script_sources import reachable
from shared.model.errors import UnavailableError
from shared.model.lease import (
    END_MARGIN_S,
    LIVE,
    TRANSITIONS,
    Lease,
    LeaseState,
    StaleLeaseError,
    ends_by,
    expected_end,
)
from shared.model.ledger import AlreadyLeased, NoCapacity, Reserved
from shared.model.names import NodeName
from shared.model.request import Term
from tests.support.placer.ledger import (
    NOW,
    assert_sound,
    device,
    facts,
    ledger,
    report,
    reservation,
    reservation_among,
    reserve,
    share,
    uses,
    uuid,
)
from tests.support.servers.valkey import valkey_server

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


@pytest.mark.parametrize("state", LeaseState)
async def test_only_a_pod_without_a_live_lease_gets_another_one(
    leases: RedisLeases, state: LeaseState
) -> None:
    before = await lease_in(state, leases)

    [outcome] = await leases.reserve([reservation("p", share("a"))], now=LATER, ttl_s=30)

    assert isinstance(outcome, Reserved | AlreadyLeased)
    if state in LIVE:
        assert outcome == AlreadyLeased(lease=before)
    else:
        assert isinstance(outcome, Reserved)
        assert outcome.lease.version > before.version


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
    [lease] = await reserve(leases, replace(reservation("p", share("a")), term=term))
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
    wanted = replace(reservation("p", share("a")), term=term)
    lease = new_lease(wanted, 1, iter([17, 3, 40]), NOW, NOW + 30)

    assert expected_end(lease, learned_s) == expected


@pytest.mark.parametrize("state", sorted(LIVE))
async def test_a_resize_leaves_the_state_as_it_is(leases: RedisLeases, state: LeaseState) -> None:
    before = await lease_in(state, leases)
    shares = tuple(structs.replace(each, memory_mib=5_000) for each in before.shares)

    after = await leases.resizes.apply(structs.replace(before, shares=shares))

    assert isinstance(after, Lease)
    assert after.state is state


@pytest.mark.nodes(a=1, b=1)
async def test_a_reservation_takes_the_first_candidate_that_fits(leases: RedisLeases) -> None:
    await reserve(leases, reservation("first", share("a", mib=15_000)))

    [lease] = await reserve(
        leases, reservation_among("second", [("a", [share("a")]), ("b", [share("b")])])
    )

    assert lease.node == "b"
    assert lease.shares[0].slot == 0
    assert lease.state is LeaseState.RESERVED
    assert lease.expires_at == NOW + 30
    assert await leases.load([lease.pod]) == [lease]
    assert await leases.load_node(NodeName("b")) == [lease]
    await assert_sound(leases)


@pytest.mark.nodes(a=1)
async def test_a_refusal_carries_the_totals_of_the_candidates(leases: RedisLeases) -> None:
    await reserve(leases, reservation("p", share("a", mib=10_000, cores=40)))

    [full] = await leases.reserve([reservation("q", share("a", mib=10_000))], now=NOW, ttl_s=30)

    assert isinstance(full, NoCapacity)
    assert full.reason == f"a: memory of {uuid('a', 0)}"
    assert full.devices[uuid("a", 0)].memory_mib == 10_000
    assert full.nodes[NodeName("a")].used == {"cpu": 100, "pods": 1}


@pytest.mark.nodes(a=1, b=1)
@pytest.mark.parametrize(
    ("held", "wanted", "reason"),
    [
        (share("a", cores=70), share("a", cores=40), "cores"),
        (share("a"), share("a", cores=100), "not-idle"),
        (share("a", cores=100, mib=100), share("a", mib=100), "in-exclusive-use"),
        (share("a", mib=100), share("b"), "device-moved"),
        (share("a", mib=100), share("z"), "device-unknown"),
    ],
)
async def test_what_does_not_fit_is_refused(
    leases: RedisLeases, held: object, wanted: object, reason: str
) -> None:
    await reserve(leases, reservation("p", held))  # type: ignore[arg-type]

    [full] = await leases.reserve(
        [reservation("q", wanted)],  # type: ignore[arg-type]
        now=NOW,
        ttl_s=30,
    )

    assert isinstance(full, NoCapacity)
    assert full.reason.startswith(f"a: {reason}")


@pytest.mark.nodes(a=1, b=1)
async def test_slots_anti_affinity_and_node_resources_are_limits_too(leases: RedisLeases) -> None:
    await reserve(leases, *(reservation(f"p{n}", share("a", mib=1)) for n in range(4)))
    await reserve(leases, reservation("tagged", share("b"), node="b", tag="red"))

    refused = await leases.reserve(
        [
            reservation("slot", share("a", mib=1)),
            reservation("tag", share("b"), node="b", tag="red"),
            reservation("cpu", share("b"), node="b", cpu=64_000),
        ],
        now=NOW,
        ttl_s=30,
    )

    assert [r.reason for r in refused if isinstance(r, NoCapacity)] == [
        f"a: slots of {uuid('a', 0)}",
        f"b: anti-affinity of {uuid('b', 0)}",
        "b: resource:cpu",
    ]
    unslotted = reservation("unslotted", share("a", mib=1, slotted=False))
    [lease] = await reserve(leases, unslotted)
    assert lease.shares[0].slot is None


@pytest.mark.nodes(a=1)
async def test_containers_are_added_up_and_init_containers_use_what_the_others_use(
    leases: RedisLeases,
) -> None:
    [lease] = await reserve(
        leases,
        reservation(
            "p",
            share("a", mib=9_000, container="init", init=True),
            share("a", mib=4_000, container="one"),
            share("a", mib=4_000, container="two"),
        ),
    )

    assert [s.slot for s in lease.shares] == [0, 0, 1]
    assert len({s.fence for s in lease.shares}) == 3
    use = (await uses(leases))[uuid("a", 0)]
    assert (use.memory_mib, use.shares) == (9_000, 2)


@pytest.mark.nodes(a=1)
async def test_a_sidecar_is_added_to_the_init_containers_after_it_and_to_the_others(
    leases: RedisLeases,
) -> None:
    [lease] = await reserve(
        leases,
        reservation(
            "p",
            share("a", mib=9_000, cores=10, container="first", init=True),
            share("a", mib=2_000, cores=20, container="sidecar"),
            share("a", mib=8_000, cores=30, container="second", init=True),
            share("a", mib=5_000, cores=50, container="main"),
        ),
    )

    assert [s.slot for s in lease.shares] == [0, 0, 1, 1]
    use = (await uses(leases))[uuid("a", 0)]
    assert (use.memory_mib, use.cores_percent, use.shares) == (10_000, 70, 2)
    assert use.slots_taken == "11"


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


async def test_only_reservations_past_their_time_expire(leases: RedisLeases) -> None:
    early = [reservation(f"p{n:03d}", share("a", n % 2, mib=1, slotted=False)) for n in range(100)]
    await reserve(leases, *early)
    await reserve(leases, reservation("late", share("a", slotted=False)), now=NOW + 10)

    expired = await leases.expire(NOW + 30)

    assert len(expired) == 100
    assert {lease.state for lease in expired} == {LeaseState.EXPIRED}
    assert [lease.pod for lease in await assert_sound(leases)] == ["late"]


async def test_a_pod_without_gpu_takes_ordinary_resources_only(leases: RedisLeases) -> None:
    [lease] = await reserve(leases, reservation("p"))

    assert lease.shares == ()
    assert isinstance((await leases.bind([lease]))[0], Lease)
    assert isinstance((await leases.bind([lease]))[0], Lease)


async def test_all_leases_are_read_page_by_page(leases: RedisLeases) -> None:
    wanted = [reservation(f"p{n}", share("a", mib=1, slotted=False), cpu=1) for n in range(109)]
    await reserve(leases, *wanted)

    found = [lease.pod async for page in leases.load_all() for lease in page]

    assert sorted(found) == sorted(w.pod for w in wanted)


async def test_a_missing_or_shrunk_device_keeps_its_leases_and_gets_no_more(
    leases: RedisLeases,
) -> None:
    await reserve(leases, reservation("p", share("a", 0)), reservation("q", share("a", 1)))

    await leases.save_devices([report("a", [device("a", 1, memory_mib=1_000)])])

    refused = await leases.reserve(
        [reservation("r", share("a", 0)), reservation("s", share("a", 1, mib=1))], now=NOW, ttl_s=30
    )
    assert [r.reason for r in refused if isinstance(r, NoCapacity)] == [
        f"a: device-unhealthy of {uuid('a', 0)}",
        f"a: memory of {uuid('a', 1)}",
    ]
    await assert_sound(leases)
    await leases.save_devices([report("a", [device("a", 0), device("a", 1)])])
    await reserve(leases, reservation("r", share("a", 0)), reservation("s", share("a", 1, mib=1)))
    await assert_sound(leases)


async def test_a_report_older_than_the_stored_one_is_ignored(leases: RedisLeases) -> None:
    assert await leases.save_devices([report("a", [device("a", 0)], at=5.0)]) is not None

    assert not await leases.save_devices([report("a", [device("a", 1)], at=4.0)])

    assert list(await uses(leases)) == [uuid("a", 0)]


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

    [full] = await leases.reserve([reservation("q", share("a"))], now=NOW, ttl_s=30)
    assert isinstance(full, NoCapacity)
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
            assert isinstance(outcomes[0], Reserved)


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
