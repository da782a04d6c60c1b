"""Pods that are gone: nothing is written for them, in whatever order their events arrive."""

import itertools
from collections.abc import Sequence

import pytest
from redis.asyncio import Redis

from shared.ledger.leases import RedisLeases
from shared.model.lease import Lease
from shared.model.ledger import GangIncomplete, GonePod, Reserved
from shared.model.names import NodeName, PodUid
from tests.support.placer.gangs import GANG, in_gang, member, reserve_gang
from tests.support.placer.ledger import (
    NOW,
    assert_sound,
    ledger,
    queued,
    reservation,
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


async def test_a_pod_that_is_gone_does_not_wait(url: str) -> None:
    async with ledger(url) as leases:
        await leases.waiting_pods.remove([GHOST])

        capacity = await leases.capacity()

        result = await leases.waiting_pods.enqueue([verdict(queued("ghost"), capacity)])

        assert await waiting(leases) == set()
        assert result.gone == (GHOST,)


async def test_nothing_is_reserved_for_a_pod_that_is_gone(url: str) -> None:
    async with ledger(url) as leases:
        await leases.waiting_pods.remove([GHOST])
        wanted = [reservation(pod, share("a", 0, 4_000)) for pod in ("ghost", "p")]

        outcomes = await leases.reserve(wanted, now=NOW, ttl_s=30)

        assert [lease.pod for lease in await assert_sound(leases)] == [P]
        assert [type(outcome) for outcome in outcomes] == [GonePod, Reserved]


async def test_a_pod_that_is_gone_is_not_counted_with_its_gang(url: str) -> None:
    async with ledger(url) as leases:
        await leases.waiting_pods.remove([GHOST])

        assert await count_gang(leases, "ghost", "p", "q") == (0, 2)
        assert await waiting(leases) == {P, Q}
        assert await leases.totals.waiting_gangs() == {GANG.name: {P, Q}}


async def test_a_gang_of_which_a_pod_is_gone_reserves_nothing(url: str) -> None:
    async with ledger(url) as leases:
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


async def test_a_gang_that_loses_a_pod_before_it_is_bound_gives_up_its_reservations(
    url: str,
) -> None:
    async with ledger(url) as leases:
        assert await reserve_gang(leases, member("p"), member("q"), member("r")) == [Reserved] * 3

        ended = await leases.release([Q], reason="the pod was deleted")

        assert {lease.pod for lease in ended} == {P, Q, R}
        assert await assert_sound(leases) == []
        assert await leases.totals.gangs() == {}


async def test_a_bound_gang_keeps_its_leases_without_one_of_its_pods(url: str) -> None:
    async with ledger(url) as leases:
        await reserve_gang(leases, member("p"), member("q"), member("r"))
        found = [lease for lease in await leases.load([P]) if lease]
        assert [type(lease) for lease in await leases.bind(found)] == [Lease]

        ended = await leases.release([Q], reason="the pod was deleted")

        assert [lease.pod for lease in ended] == [Q]
        assert await leases.totals.gangs() == {GANG.name: {P, R}}


async def test_a_new_gang_does_not_count_the_pods_of_the_one_before(url: str) -> None:
    """Pods deleted by force hold their leases until their node confirms that they have ended."""
    async with ledger(url) as leases:
        await reserve_gang(leases, member("p"), member("q"), member("r"))
        await leases.bind([lease for lease in await leases.load([P]) if lease])
        await leases.waiting_pods.remove([P, Q, R])

        assert await count_gang(leases, "p2") == (0, 1)
        assert len(await leases.load_node(NodeName("a"))) == 3

        await leases.release([P, Q, R], reason="the pod has terminated")
        assert await assert_sound(leases) == []


async def test_a_rebuild_knows_which_pods_are_gone(url: str) -> None:
    async with ledger(url) as leases:
        await leases.waiting_pods.remove([GHOST])
        token = await leases.begin_rebuild(now=NOW, force=True)
        assert token is not None
        await leases.finish_rebuild(token)

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
        token = await leases.begin_rebuild(now=NOW, force=True)
        assert token is not None
        await leases.finish_rebuild(token)
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
