"""Gangs in the ledger, all or nothing and offered once; and pods that are gone, in any order."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from msgspec import structs
from redis.asyncio import Redis

from shared.ledger.leases import RedisLeases
from shared.ledger.preemptions import Preemptions
from shared.model.events.pod_events import PodQueued
from shared.model.leases.ledger import (
    GangIncomplete,
    GonePod,
    NoCapacity,
    ReservedLease,
    WaitingPod,
    WaitResult,
    reservation_for,
)
from shared.model.leases.preemption import Preemption
from shared.model.names import NodeName, PodUid
from shared.model.requests.placement import Placement, Refusal
from shared.model.requests.request import Gang
from tests.support.placer.ledger import (
    GANG,
    NOW,
    assert_sound,
    in_gang,
    ledger,
    member,
    queued,
    rebuild,
    reservation,
    reserve,
    reserve_gang,
    share,
    verdict,
)

P, Q, R, GHOST = map(PodUid, ("p", "q", "r", "ghost"))


async def count_gang(leases: RedisLeases, *pods: str) -> tuple[int, int]:
    enrolled = [verdict(in_gang(pod), 0) for pod in pods]
    counted = await leases.waiting_pods.enroll(GANG, enrolled)
    return counted.live_count, counted.waiting_count


async def waiting(leases: RedisLeases) -> set[PodUid]:
    return {each.queued.pod for each in await leases.waiting_pods.load()}


async def test_a_pod_that_is_gone_does_not_wait(leases: RedisLeases) -> None:
    await leases.waiting_pods.remove([GHOST])

    capacity = await leases.capacity()

    result = await leases.waiting_pods.enqueue([verdict(queued("ghost"), capacity)])

    assert await waiting(leases) == set()
    assert result.gone == (GHOST,)


async def test_nothing_is_reserved_for_a_pod_that_is_gone(leases: RedisLeases) -> None:
    await leases.waiting_pods.remove([GHOST])
    wanted = [reservation(pod, share("a", 0, 4_000)) for pod in ("ghost", "p")]

    outcomes = await leases.reserve(wanted, now=NOW, ttl_s=30)

    assert [lease.pod for lease in await assert_sound(leases)] == [P]
    assert [type(outcome) for outcome in outcomes] == [GonePod, ReservedLease]


async def test_a_pod_that_is_gone_is_not_counted_with_its_gang(leases: RedisLeases) -> None:
    await leases.waiting_pods.remove([GHOST])

    assert await count_gang(leases, "ghost", "p", "q") == (0, 2)
    assert await waiting(leases) == {P, Q}
    assert await leases.totals.waiting_gangs() == {GANG.name: {P, Q}}


async def test_a_gang_of_which_a_pod_is_gone_reserves_nothing(leases: RedisLeases) -> None:
    await leases.waiting_pods.remove([GHOST])

    outcomes = await reserve_gang(leases, member("p"), member("ghost"), member("q"))

    assert await assert_sound(leases) == []
    assert outcomes == [GangIncomplete, GonePod, GangIncomplete]


STEPS = ("queued", "gone", "others")


@pytest.mark.parametrize(
    "order", [each for each in itertools.permutations(STEPS) if each[0] != "others"], ids="-".join
)
@pytest.mark.parametrize("reserves", [False, True])
async def test_no_order_of_events_lets_a_gang_begin_short(
    url: str, order: Sequence[str], reserves: bool
) -> None:
    """As the placer does it: enroll, and reserve for those that wait once they are enough."""

    async def queue(leases: RedisLeases, *pods: str) -> None:
        enrolled = [verdict(in_gang(pod), 0) for pod in pods]
        counted = await leases.waiting_pods.enroll(GANG, enrolled)
        if reserves and counted.waiting_count >= GANG.min_member:
            await reserve_gang(leases, *map(member, (each.queued.pod for each in counted.waiting)))

    async with ledger(url) as leases:
        for step in order:
            match step:
                case "queued":
                    await queue(leases, "ghost")
                case "gone":
                    await leases.waiting_pods.remove([GHOST])
                    await leases.release([GHOST], reason="the pod is gone")
                case "others":
                    await queue(leases, "p", "q")

        assert await assert_sound(leases) == []
        assert await count_gang(leases, "p", "q") == (0, 2)


async def test_a_new_gang_does_not_count_the_pods_of_the_one_before(leases: RedisLeases) -> None:
    """Pods deleted by force hold their leases until their node confirms that they have ended."""
    await reserve_gang(leases, member("p"), member("q"), member("r"))
    await leases.bind([lease for lease in await leases.load([P]) if lease])
    await leases.waiting_pods.remove([P, Q, R])

    assert await count_gang(leases, "p2") == (0, 1)
    assert len(await leases.load_node(NodeName("a"))) == 3

    await leases.release([P, Q, R], reason="the pod has terminated")
    assert await assert_sound(leases) == []


async def test_a_rebuild_knows_which_pods_are_gone(leases: RedisLeases) -> None:
    await leases.waiting_pods.remove([GHOST])
    await rebuild(leases, force=True)

    await leases.waiting_pods.enqueue([verdict(queued("ghost"), await leases.capacity())])

    assert await waiting(leases) == set()


@pytest.mark.parametrize(
    ("age_s", "others", "is_remembered"),
    [(3_600, 9_997, True), (3_600, 9_998, False), (590, 9_998, True)],
)
async def test_gone_pods_are_forgotten_after_ten_minutes_but_for_the_newest_10_000(
    url: str, age_s: float, others: int, is_remembered: bool
) -> None:
    """A jump of the server's clock makes all of them old at once."""
    async with RedisLeases.connect(url, prefix="aged:") as leases, Redis.from_url(url) as redis:
        await rebuild(leases, force=True)
        await redis.delete("aged:gone")
        await leases.waiting_pods.remove([GHOST])
        assert await redis.ttl("aged:gone") == -1
        seconds, _ = await redis.time()
        assert await redis.zscore("aged:gone", GHOST) == pytest.approx(seconds, abs=5)
        await redis.zadd("aged:gone", {"oldest": seconds - age_s - 5})
        await redis.zadd("aged:gone", {f"old-{n}": seconds - age_s for n in range(others)})

        await leases.waiting_pods.remove([P])

        remembered = await leases.waiting_pods.list_gone([PodUid("oldest"), GHOST, P])
        assert remembered == {GHOST, P} | ({PodUid("oldest")} if is_remembered else set())


async def enroll(leases: RedisLeases, *pods: PodQueued) -> tuple[int, int, list[str]]:
    counted = await leases.waiting_pods.enroll(
        pods[0].request.gang or GANG, [verdict(p, 0) for p in pods]
    )
    return (
        counted.live_count,
        counted.waiting_count,
        [waiting.queued.pod for waiting in counted.waiting],
    )


async def test_a_gang_of_which_one_pod_does_not_fit_reserves_nothing_and_gets_the_stored_totals(
    leases: RedisLeases,
) -> None:
    await reserve(leases, reservation("other", share("a", 1, 14_000)))
    before = await leases.capacity()

    outcomes = await leases.reserve_gang(
        GANG, [member("p", 0), member("q", 1), member("r", 0)], now=NOW, ttl_s=30
    )

    assert [type(outcome) for outcome in outcomes] == [GangIncomplete, NoCapacity, GangIncomplete]
    full = outcomes[1]
    assert isinstance(full, NoCapacity)
    assert [(d, use.memory_mib) for d, use in full.devices.items()] == [("GPU-a-1", 14_000)]
    assert full.nodes["a"].used["pods"] == 1  # type: ignore[index]
    assert [lease.pod for lease in await assert_sound(leases)] == ["other"]
    assert await leases.totals.gangs() == {}
    assert await leases.capacity() == before


async def test_a_gang_that_would_be_too_small_is_not_reserved_even_if_its_pods_fit(
    leases: RedisLeases,
) -> None:
    assert await reserve_gang(leases, member("p"), member("q")) == [GangIncomplete] * 2
    assert await reserve_gang(leases, *map(member, ("p", "q", "r"))) == [ReservedLease] * 3
    await leases.bind([lease for lease in await leases.load([PodUid("p")]) if lease])
    await leases.release([PodUid("q")], reason="died")

    assert await reserve_gang(leases, member("replacement")) == [ReservedLease]

    await leases.release([PodUid("p"), PodUid("r")], reason="died")
    assert await reserve_gang(leases, member("late")) == [GangIncomplete]


async def test_a_gang_of_a_thousand_pods_is_reserved_in_one_step(url: str) -> None:
    async with ledger(url, {f"n{n}": 8 for n in range(32)}) as leases:
        gang = Gang(name="default/g", min_member=1_000)
        wanted = [
            structs.replace(
                reservation(f"p{n}", share(f"n{n % 32}", n // 128), node=f"n{n % 32}"),
                gang=gang.name,
            )
            for n in range(1_000)
        ]

        short = await leases.reserve_gang(gang, wanted[:-1], now=NOW, ttl_s=30)
        whole = await leases.reserve_gang(gang, wanted, now=NOW, ttl_s=30)

        assert {type(outcome) for outcome in short} == {GangIncomplete}
        assert {type(outcome) for outcome in whole} == {ReservedLease}
        assert len(await leases.expire(NOW + 31)) == 1_000
        assert await assert_sound(leases) == []


async def test_a_gang_is_counted_while_its_pods_arrive_at_several_placers(
    leases: RedisLeases,
) -> None:
    assert await enroll(leases, in_gang("p")) == (0, 1, [])
    assert await enroll(leases, in_gang("p")) == (0, 1, [])
    assert await enroll(leases, in_gang("q")) == (0, 2, [])

    assert await enroll(leases, in_gang("r")) == (0, 3, ["p", "q", "r"])

    assert await enroll(leases, in_gang("x", gang=Gang(name="default/gx", min_member=2))) == (
        0,
        1,
        [],
    )
    await leases.waiting_pods.remove([PodUid("q")])
    assert await enroll(leases, in_gang("r")) == (0, 2, [])


async def test_the_last_of_concurrent_enrollments_counts_all_pods_of_a_gang(
    leases: RedisLeases,
) -> None:
    gang = Gang(name="default/g", min_member=20)

    counted = await asyncio.gather(
        *(enroll(leases, in_gang(f"p{n:02d}", gang=gang)) for n in range(20))
    )

    assert sorted(here for _, here, _ in counted) == list(range(1, 21))
    assert sorted(len(pods) for _, _, pods in counted) == [0] * 19 + [20]


async def test_further_pods_are_reserved_one_by_one_while_their_gang_runs(
    leases: RedisLeases,
) -> None:
    await reserve_gang(leases, member("p"), member("q"), member("r"))
    wanted = [member("s", 1), member("too-large", 1, 20_000)]

    outcomes = await leases.reserve_further(GANG, wanted, now=NOW, ttl_s=30)

    assert [type(outcome) for outcome in outcomes] == [ReservedLease, NoCapacity]
    assert await leases.totals.gangs() == {GANG.name: {"p", "q", "r", "s"}}


async def test_further_pods_of_a_gang_that_has_ended_are_not_reserved(leases: RedisLeases) -> None:
    await reserve_gang(leases, member("p"), member("q"), member("r"))
    await leases.release([PodUid("p")], reason="it was deleted before its gang was bound")

    outcomes = await leases.reserve_further(GANG, [member("s", 1)], now=NOW, ttl_s=30)

    assert [type(outcome) for outcome in outcomes] == [GangIncomplete]
    assert await assert_sound(leases) == []


async def test_an_enrollment_returns_the_nodes_of_a_gang_with_a_topology(url: str) -> None:
    in_rack = structs.replace(GANG, required_topology=("example.com/rack",))
    on_b = structs.replace(reservation("r", share("b", 0), node="b"), gang=GANG.name)
    late = [verdict(in_gang("late", gang=in_rack), 0)]
    async with ledger(url, {"a": 2, "b": 1}) as leases:
        await reserve_gang(leases, member("p"), member("q"), on_b)

        plain = await leases.waiting_pods.enroll(GANG, [verdict(in_gang("late"), 0)])
        counted = await leases.waiting_pods.enroll(in_rack, late)
        await leases.waiting_pods.remove([R])
        later = await leases.waiting_pods.enroll(in_rack, late)

    assert plain.nodes == ()
    assert sorted(counted.nodes) == ["a", "b"]
    assert later.nodes == ("a",)


async def test_a_gang_with_a_topology_is_not_reserved_beside_pods_that_were_not_counted(
    leases: RedisLeases,
) -> None:
    await reserve_gang(leases, *map(member, ("p", "q", "r")))
    wanted = [member(pod, 1) for pod in ("s", "t", "u")]

    refused = await leases.reserve_gang(GANG, wanted, now=NOW, ttl_s=30, live=0)
    granted = await leases.reserve_gang(GANG, wanted, now=NOW, ttl_s=30, live=3)

    assert [type(outcome) for outcome in refused] == [GangIncomplete] * 3
    assert [type(outcome) for outcome in granted] == [ReservedLease] * 3


async def test_a_repeated_enrollment_returns_all_leases_that_may_not_have_been_reported(
    leases: RedisLeases,
) -> None:
    await enroll(leases, in_gang("p"), in_gang("q"), in_gang("r"), in_gang("s"))
    await reserve_gang(leases, member("p"), member("q"), member("r"))

    counted = await leases.waiting_pods.enroll(GANG, [verdict(in_gang("r"), 0)])

    assert (counted.live_count, counted.waiting_count) == (3, 1)
    assert [lease.pod for lease in counted.leases] == ["p", "q", "r"]
    assert [waiting.queued.pod for waiting in counted.waiting] == ["s"]


async def test_a_plan_that_knows_only_some_leases_of_a_gang_is_not_stored(
    leases: RedisLeases,
) -> None:
    await reserve_gang(leases, member("p"), member("q"), member("r"))
    plans = leases.part(Preemptions)
    plan = Preemption(id="any", victims=(), reason="test")

    assert not await plans.open(plan, {GANG.name: 2})
    assert await plans.open(plan, {GANG.name: 3})


async def let_gang_wait(leases: RedisLeases, *events: PodQueued) -> None:
    """Have the first lead."""
    await enroll(leases, *events)
    await leases.waiting_pods.choose_offers(now=NOW)
    capacity = await leases.capacity()
    full = Refusal(reason="full")
    await leases.waiting_pods.enqueue(
        [
            WaitingPod(
                queued=event, refusal=full, capacity=capacity, receives_offers=event is events[0]
            )
            for event in events
        ]
    )


async def test_freed_capacity_is_offered_to_one_pod_of_a_gang(leases: RedisLeases) -> None:
    await reserve(leases, *(reservation(f"full-{n}", share("a", n // 4)) for n in range(8)))
    await let_gang_wait(leases, *(in_gang(f"p{n}") for n in range(5)))

    await leases.release([PodUid(f"full-{n}") for n in range(6)], reason="test")

    assert [event.pod for event in (await leases.waiting_pods.choose_offers(now=NOW)).pods] == [
        "p0"
    ]
    assert (await leases.waiting_pods.choose_offers(now=NOW)).pods == ()


async def test_pods_of_a_gang_do_not_wait_for_what_is_offered_to_each_other(
    leases: RedisLeases,
) -> None:
    await reserve(leases, *(reservation(f"full-{n}", share("a", n // 4)) for n in range(8)))
    gang = [in_gang(f"p{n}", priority=priority) for n, priority in enumerate((10, 0, 0))]
    await let_gang_wait(leases, *gang)
    await leases.release([PodUid(f"full-{n}") for n in range(8)], reason="test")
    offered = await leases.waiting_pods.choose_offers(now=NOW)
    place = (Placement(node=NodeName("a"), shares=(share("a"),)),)

    outcomes = await leases.reserve_gang(
        GANG, [reservation_for(event, place) for event in gang], now=NOW, ttl_s=30
    )

    assert [event.pod for event in offered.pods] == ["p0"]
    assert list(map(type, outcomes)) == [ReservedLease] * 3


async def test_a_gang_whose_leader_is_gone_gets_another_leader(leases: RedisLeases) -> None:
    await reserve(leases, *(reservation(f"full-{n}", share("a", n // 4)) for n in range(8)))
    await let_gang_wait(leases, *(in_gang(f"p{n}") for n in range(5)))
    await leases.waiting_pods.remove([PodUid("p0")])

    await leases.release([PodUid("full-0")], reason="test")

    assert [event.pod for event in (await leases.waiting_pods.choose_offers(now=NOW)).pods] == [
        "p1"
    ]


async def test_a_verdict_about_missing_pods_is_stale_once_they_exist(leases: RedisLeases) -> None:
    await let_gang_wait(leases, in_gang("p"), in_gang("q"))
    missing = replace(verdict(in_gang("p"), 0), receives_offers=False, min_members=3)
    assert await leases.waiting_pods.enqueue([missing]) == WaitResult()
    await enroll(leases, in_gang("r"))

    assert await leases.waiting_pods.enqueue([missing]) == WaitResult(stale=(PodUid("p"),))


async def test_of_a_gang_with_a_bound_pod_no_reservation_is_loaded(leases: RedisLeases) -> None:
    await enroll(leases, in_gang("p"), in_gang("q"), in_gang("r"))
    await reserve_gang(leases, member("p"), member("q"), member("r"))
    [first] = filter(None, await leases.load([P]))
    assert [each.pod for each in await leases.load_reserved_gang(GANG.name)] == ["p", "q", "r"]

    await leases.bind([first])

    assert await leases.load_reserved_gang(GANG.name) == []
