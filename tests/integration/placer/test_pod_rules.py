"""Placers that decide at once: required rules about other pods hold, by the ledger's refusal."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from services.placer.service import Placer
from shared.ledger.leases import RedisLeases
from shared.model.clock import SystemClock
from shared.model.devices.node import HOSTNAME, AntiAffinityTerm, LabelRequirement
from shared.model.errors import ConflictError
from shared.model.events.pod_events import PlacementChosen, PlacementRefused, PodQueued
from shared.model.names import PodUid
from shared.model.requests.pod_rules import (
    SELECTED_PREFIX,
    AffinityRule,
    AntiAffinityRule,
    PodRules,
    SpreadRule,
)
from shared.model.requests.request import Gang
from tests.support.build import dice, gpu, pod_queued, request
from tests.support.placer.ledger import assert_sound, facts, ledger
from tests.support.placer.running import placers
from tests.support.waiting import until

ZONE = "topology.kubernetes.io/zone"
TRAINS = f"{SELECTED_PREFIX}trains"
SHARE = request(gpu(memory=1_000), resources={"cpu": 100, "pods": 1})
NODES = {"a1": "a", "a2": "a", "b1": "b", "b2": "b", "c1": "c"}
APART = PodRules(anti_affinity=(AntiAffinityRule(counted_as=TRAINS, key=HOSTNAME),))
ZONES_APART = PodRules(anti_affinity=(AntiAffinityRule(counted_as=TRAINS, key=ZONE),))
SPREAD = PodRules(spread=(SpreadRule(counted_as=TRAINS, key=ZONE, selects_itself=True),))
TOGETHER = PodRules(affinity=AffinityRule(counted_as=TRAINS, keys=(ZONE,)))


def trains(rules: PodRules | None, count: int, first: int = 0, **fields: Any) -> list[PodQueued]:
    """Return pods that their rules select themselves."""
    wanted = structs.replace(SHARE, pod_rules=rules, selected_as=(TRAINS,), **fields)
    return [pod_queued(f"uid-{first + number}", wanted) for number in range(count)]


@asynccontextmanager
async def zones(url: str) -> AsyncIterator[RedisLeases]:
    async with ledger(url, dict.fromkeys(NODES, 4)) as leases:
        labelled = [
            replace(facts(name), labels={HOSTNAME: name, ZONE: zone})
            for name, zone in NODES.items()
        ]
        await leases.save_nodes(labelled)
        yield leases


async def decided(
    several: Sequence[Placer], batches: Sequence[Sequence[PodQueued]]
) -> Counter[type]:
    """Have each placer place a batch, again if it gives up, as its queue does."""

    async def place(placer: Placer, batch: Sequence[PodQueued]) -> list[type]:
        while True:
            try:
                return [type(event) for event in await placer.place_pods(batch)]
            except ConflictError:
                continue

    answers = await asyncio.gather(*map(place, several, batches))
    return Counter(outcome for batch in answers for outcome in batch)


async def places(leases: RedisLeases) -> Counter[str]:
    return Counter(lease.node for lease in await assert_sound(leases))


async def zone_counts(leases: RedisLeases) -> list[int]:
    counts = Counter(dict.fromkeys(NODES.values(), 0))
    for node, count in (await places(leases)).items():
        counts[NODES[node]] += count
    return sorted(counts.values())


async def test_pods_that_repel_each_other_share_no_node(url: str) -> None:
    async with zones(url) as leases, placers(leases, 3) as several:
        batches = [trains(APART, 4, 4 * number) for number in range(3)]

        outcomes = await decided(several, batches)

        assert outcomes == {PlacementChosen: 5, PlacementRefused: 7}
        assert await places(leases) == dict.fromkeys(NODES, 1)


async def test_pods_that_repel_each_other_share_no_zone(url: str) -> None:
    async with zones(url) as leases, placers(leases, 3) as several:
        outcomes = await decided(several, [trains(ZONES_APART, 2, 2 * n) for n in range(3)])

        assert outcomes == {PlacementChosen: 3, PlacementRefused: 3}
        assert await zone_counts(leases) == [1, 1, 1]


async def test_pods_are_spread_evenly_by_placers_together(url: str) -> None:
    async with zones(url) as leases, placers(leases, 3) as several:
        outcomes = await decided(several, [trains(SPREAD, 6, 6 * n) for n in range(3)])

        assert outcomes == {PlacementChosen: 18}
        assert await zone_counts(leases) == [6, 6, 6]


async def test_pods_that_want_to_be_together_start_in_one_zone(url: str) -> None:
    async with zones(url) as leases, placers(leases, 3) as several:
        outcomes = await decided(several, [trains(TOGETHER, 3, 3 * n) for n in range(3)])

        assert outcomes == {PlacementChosen: 9}
        assert await zone_counts(leases) == [0, 0, 9]


def selector(app: str) -> tuple[LabelRequirement, ...]:
    return (LabelRequirement("app", "In", (app,)),)


REPELS = structs.replace(
    ZONES_APART,
    repels=(AntiAffinityTerm(topology_key=ZONE, selector=selector("x"), all_namespaces=True),),
)


@pytest.mark.parametrize("turn", range(4))
async def test_a_pod_and_those_that_it_repels_share_no_zone_whoever_is_first(
    url: str, turn: int
) -> None:
    async with zones(url) as leases, placers(leases, 3) as several:
        shy = [replace(pod, request=structs.replace(pod.request, selected_as=())) for pod in
               trains(REPELS, 1, 90)]  # fmt: skip
        selected = [
            [replace(pod, labels={"app": "x"}) for pod in trains(None, 2, 2 * number)]
            for number in range(2)
        ]
        batches = [shy, *selected]

        await decided(several, batches[turn % 3 :] + batches[: turn % 3])

        nodes = {lease.pod: lease.node for lease in await assert_sound(leases)}
        own = nodes.pop(PodUid("uid-90"), None)
        assert nodes
        assert own is None or NODES[own] not in {NODES[node] for node in nodes.values()}


async def read_once(placer: Placer) -> None:
    """Apply a snapshot, and no change after it."""
    before = placer.mirror.version
    following = asyncio.create_task(placer.ledger_mirror.follow())
    await until(lambda: placer.mirror.version > before)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


@pytest.mark.parametrize("rules", [APART, SPREAD, TOGETHER])
async def test_a_placer_that_is_behind_reserves_nothing_by_old_counts(
    url: str, rules: PodRules
) -> None:
    async with zones(url) as leases, placers(leases, 1) as (current,):
        behind = Placer(leases, SystemClock(), dice(1), ttl_s=30.0)
        await read_once(behind)
        [chosen] = await current.place_pods(trains(rules, 1))
        assert isinstance(chosen, PlacementChosen)

        with pytest.raises(ConflictError, match="undecided"):
            await behind.place_pods(trains(rules, 1, 1))
        unaffected = await behind.place_pods([pod_queued("uid-2", SHARE)])
        await read_once(behind)
        again = await behind.place_pods(trains(rules, 1, 3))

        assert [type(event) for event in (*unaffected, *again)] == [PlacementChosen] * 2


async def test_a_selected_pod_whose_lease_does_not_count_it_is_waited_for(url: str) -> None:
    """Its event was sent before a rule selected it."""
    async with zones(url) as leases, placers(leases, 1) as (placer,):
        await placer.place_pods([pod_queued("uid-old", SHARE)])
        waiting = trains(APART, 1, uncounted=((TRAINS, PodUid("uid-old")),))

        with pytest.raises(ConflictError, match="undecided"):
            await placer.place_pods(waiting)
        await leases.release([PodUid("uid-old")], reason="gone")
        [chosen] = await placer.place_pods(waiting)

        assert isinstance(chosen, PlacementChosen)


async def test_a_gang_whose_pods_repel_each_other_gets_nodes_of_its_own_or_none(url: str) -> None:
    def gang(name: str, count: int, first: int) -> list[PodQueued]:
        return trains(APART, count, first, gang=Gang(name=name, min_member=count))

    async with zones(url) as leases, placers(leases, 2) as several:
        outcomes = await decided(several, [gang("ns/one", 3, 0), gang("ns/two", 3, 10)])

        assert outcomes == {PlacementChosen: 3, PlacementRefused: 3}
        assert sorted((await places(leases)).values()) == [1, 1, 1]


async def test_a_refused_pod_is_decided_again_once_a_pod_that_it_selects_has_started(
    url: str,
) -> None:
    async with zones(url) as leases, placers(leases, 2) as (placer, other):
        waiting = [
            replace(pod, request=structs.replace(pod.request, selected_as=()))
            for pod in trains(TOGETHER, 1, 50)
        ]
        [refused] = await placer.place_pods(waiting)
        assert isinstance(refused, PlacementRefused)
        published = placer.requeue_refused()
        assert placer.rounds.refused.by_rules.take_changed(1) == []

        await other.place_pods(trains(None, 1))
        [queued] = await asyncio.wait_for(anext(published), 30)
        [chosen] = await placer.place_pods([queued])

        assert isinstance(chosen, PlacementChosen)
        nodes = await places(leases)
        assert len({NODES[node] for node in nodes}) == 1


async def test_counts_end_with_their_leases(url: str) -> None:
    async with zones(url) as leases, placers(leases, 1) as (placer,):
        await placer.place_pods(trains(APART, 5))
        assert [type(e) for e in await placer.place_pods(trains(APART, 1, 9))] == [PlacementRefused]

        await leases.release([PodUid("uid-1")], reason="gone")
        offered = (await leases.waiting_pods.choose_offers(now=0.0)).pods
        answers = await placer.place_pods(offered)

        assert [type(event) for event in answers] == [PlacementChosen]
        assert await places(leases) == dict.fromkeys(NODES, 1)
