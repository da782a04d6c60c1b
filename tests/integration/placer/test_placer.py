"""Placers on a real ledger: several at once, without knowing of each other."""

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from services.placer.service import Placer
from shared.ledger.leases import RedisLeases
from shared.model.clock import SystemClock
from shared.model.device import DeviceMode, DeviceUse, MigLayout, MigProfile
from shared.model.errors import ConflictError
from shared.model.events.pod_events import PlacementChosen, PlacementRefused, PodQueued
from shared.model.lease import Lease, MigPlacement
from shared.model.names import NodeName, PodUid
from shared.model.node import HOSTNAME, AntiAffinityTerm, LabelRequirement
from shared.model.request import DeviceSelection, SharingPolicy
from tests.support.build import dice, gpu, pod_queued, request
from tests.support.placer.ledger import (
    assert_sound,
    device,
    facts,
    ledger,
    report,
    reservation,
    reserve,
    share,
    uses,
)
from tests.support.placer.running import placers
from tests.support.waiting import until

SHARE = request(gpu(memory=4_000), resources={"cpu": 100, "pods": 1})


def pods(count: int, first: int = 0) -> list[PodQueued]:
    return [pod_queued(f"uid-{first + number}", SHARE) for number in range(count)]


def mirrored(placer: Placer) -> dict[str, DeviceUse]:
    return {
        device.uuid: device.use()
        for node in placer.mirror.nodes.values()
        for device in node.devices
    }


async def until_mirrored(leases: RedisLeases, several: Sequence[Placer]) -> None:
    async with asyncio.timeout(30):
        truth = await uses(leases)
        await until(lambda: not any(mirrored(placer) != truth for placer in several))


async def test_four_placers_fill_the_cluster_exactly_and_refuse_the_rest(url: str) -> None:
    async with (
        ledger(url, {f"n{number}": 2 for number in range(6)}) as leases,
        placers(leases, 4) as several,
    ):
        batches = [pods(16, 16 * number) for number in range(4)]

        answers = await asyncio.gather(
            *(placer.place_pods(batch) for placer, batch in zip(several, batches, strict=True))
        )

        outcomes = [type(one) for batch in answers for one in batch]
        assert outcomes.count(PlacementChosen) == 6 * 2 * 4
        assert outcomes.count(PlacementRefused) == 64 - 48
        assert len(await assert_sound(leases)) == 48
        await until_mirrored(leases, several)


async def test_the_same_pods_sent_to_two_placers_get_one_lease_each(url: str) -> None:
    async with ledger(url, {"a": 2, "b": 2}) as leases, placers(leases, 2) as several:
        answers = await asyncio.gather(*(placer.place_pods(pods(8)) for placer in several))

        first, second = (
            {one.lease.pod: one.lease for one in outcomes if isinstance(one, PlacementChosen)}
            for outcomes in answers
        )
        assert len(first | second) == 8
        assert all(first[pod] == second[pod] for pod in first.keys() & second.keys())
        assert len(await assert_sound(leases)) == 8


async def test_a_placer_that_is_behind_places_nothing_beside_a_pod_that_repels_it(url: str) -> None:
    selector = (LabelRequirement("app", "In", ("noisy",)),)
    term = AntiAffinityTerm(topology_key=HOSTNAME, selector=selector, all_namespaces=True)
    noisy = replace(pods(1)[0], labels={"app": "noisy"})
    async with ledger(url, {"a": 1}) as leases:
        await leases.save_nodes([replace(facts("a"), labels={HOSTNAME: "a"})])
        placer = Placer(leases, SystemClock(), dice(1), ttl_s=30.0)
        await read_once(placer)
        await reserve(leases, replace(reservation("quiet", share("a")), repels=(term,)))

        with pytest.raises(ConflictError, match="undecided"):
            await placer.place_pods([noisy])
        await read_once(placer)
        [refused] = await placer.place_pods([noisy])

        assert isinstance(refused, PlacementRefused)
        assert refused.refusal.counts == (("ExistingAntiAffinity", 1),)


async def read_once(placer: Placer) -> None:
    """Apply a snapshot, and no change after it."""
    known = placer.mirror.version
    following = asyncio.create_task(placer.ledger_mirror.follow())
    await until(lambda: placer.mirror.version > known)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_freed_capacity_reaches_a_placer_and_the_pod_that_waits(url: str) -> None:
    async with ledger(url, {"a": 1}) as leases, placers(leases, 1) as (placer,):
        await placer.place_pods(pods(4))
        assert [type(one) for one in await placer.place_pods(pods(1, 4))] == [PlacementRefused]

        await leases.release([PodUid("uid-0")], reason="gone")
        offered = (await leases.waiting_pods.choose_offers(now=0.0)).pods
        answers = await placer.place_pods(offered)

        assert [event.pod for event in offered] == ["uid-4"]
        assert [type(one) for one in answers] == [PlacementChosen]
        await until_mirrored(leases, [placer])


async def test_a_pod_without_a_gpu_is_counted_by_the_nodes_resources(url: str) -> None:
    async with ledger(url, {"a": 0}) as leases, placers(leases, 1) as (placer,):
        plain = request(resources={"cpu": 40_000, "pods": 1})

        first = await placer.place_pods([pod_queued("uid-1", plain)])
        second = await placer.place_pods([pod_queued("uid-2", plain)])

        assert [type(one) for one in (*first, *second)] == [PlacementChosen, PlacementRefused]


async def test_a_cordoned_node_gets_no_more_pods(url: str) -> None:
    async with ledger(url, {"a": 1}) as leases, placers(leases, 1) as (placer,):
        changed = facts("a")
        await leases.save_nodes(
            [type(changed)(name=changed.name, allocatable=changed.allocatable, unschedulable=True)]
        )
        await until(lambda: not placer.mirror.nodes[NodeName("a")].accepts_any_pod, limit_s=30)

        assert [type(one) for one in await placer.place_pods(pods(1))] == [PlacementRefused]


LAYOUTS = tuple(
    MigLayout(
        name=name,
        profiles=tuple(
            MigProfile(name=f"{mib}mib", memory_mib=mib, count=count) for mib, count in profiles
        ),
    )
    for name, profiles in {
        "sevenths": [(5_120, 7)],
        "mixed": [(10_240, 3), (5_120, 1)],
        "halves": [(20_480, 2)],
        "whole": [(40_960, 1)],
    }.items()
)


def instance_pods(chance: random.Random, first: int, count: int) -> list[PodQueued]:
    """Pods of one to three containers that take instances, or shares where they may."""
    wanted = []
    for number in range(count):
        containers = [
            gpu(f"c{n}", 1, chance.choice([3_000, 5_000, 8_000, 15_000, None]), mig_allowed=True)
            for n in range(chance.choice([1, 1, 1, 2, 3]))
        ]
        wanted_request = request(
            *containers,
            resources={"cpu": 10, "pods": 1},
            prefer_mig=chance.random() < 0.5,
            selection=DeviceSelection(mode=chance.choice([None, "mig", "mig"])),
        )
        wanted.append(pod_queued(f"uid-{first + number}", wanted_request))
    return wanted


def assert_instances_disjoint(leases: Iterable[Lease]) -> int:
    """Check that no position is taken twice and no device has two layouts; count the instances."""
    leased = [(lease.pod, s) for lease in leases for s in lease.shares if s.mig]
    positions = {(s.device, s.slot) for _, s in leased}
    assert len(positions) == len(leased)
    assert all(s.mig and s.slot == s.mig.position for _, s in leased)
    layouts = {(s.device, s.mig.layout) for _, s in leased if s.mig}
    assert len(layouts) == len({s.device for _, s in leased})
    return len(leased)


async def test_a_freed_instance_is_offered_to_a_pod_with_any_request_for_cores(
    url: str,
) -> None:
    def wanting(pod: str, memory: int, **fields: Any) -> PodQueued:
        wanted_request = gpu("main", 1, memory, mig_allowed=True, **fields)
        return pod_queued(pod, request(wanted_request, resources={"cpu": 100, "pods": 1}))

    async with ledger(url, {"a": 0}) as leases:
        card = device("a", 0, memory_mib=40_960, mode=DeviceMode.MIG, layouts=LAYOUTS)
        await leases.save_devices([report("a", [card])])
        async with placers(leases, 1) as (placer,):
            await placer.place_pods([wanting(f"uid-{n}", 15_000) for n in range(2)])
            alone = wanting("uid-2", 15_000, cores_percent=100, sharing=SharingPolicy.EXCLUSIVE)
            assert [type(one) for one in await placer.place_pods([alone])] == [PlacementRefused]

            await leases.release([PodUid("uid-0")], reason="gone")
            offered = (await leases.waiting_pods.choose_offers(now=0.0)).pods
            answers = await placer.place_pods(offered)

            assert [event.pod for event in offered] == ["uid-2"]
            [chosen] = answers
            assert isinstance(chosen, PlacementChosen)
            assert chosen.lease.shares[0].mig == MigPlacement(
                layout="halves", position=0, profile="20480mib"
            )


async def test_item_44_independent_placers_never_give_a_position_twice(
    url: str,
) -> None:
    chance = random.Random(44)  # noqa: S311
    async with ledger(url, {"a": 1, "b": 1}) as leases:
        for name in ("a", "b"):
            cards = [
                device(name, n, memory_mib=40_960, mode=DeviceMode.MIG, layouts=LAYOUTS)
                for n in range(1, 4)
            ]
            await leases.save_devices([report(name, [device(name, 0), *cards])])
        async with placers(leases, 4) as several:
            given = 0
            for turn in range(6):
                batches = [instance_pods(chance, 100 * turn + 10 * n, 5) for n in range(4)]
                answers = await asyncio.gather(
                    *(p.place_pods(batch) for p, batch in zip(several, batches, strict=True))
                )
                assert sum(map(len, answers)) == 20, "every pod was placed or explained"
                leased = await assert_sound(leases)
                given += assert_instances_disjoint(leased)
                await until_mirrored(leases, several)
                leaving = chance.sample([lease.pod for lease in leased], k=2 * len(leased) // 3)
                await leases.release(leaving, reason="done")
                await until_mirrored(leases, several)

            assert given > 30, "the mix fills the devices"


async def test_a_late_pod_of_low_priority_does_not_get_what_is_offered_to_a_higher_one(
    url: str,
) -> None:
    async with ledger(url, {"a": 1}) as leases, placers(leases, 2) as (one, other):
        await one.place_pods(pods(4))
        high = pod_queued("high", structs.replace(SHARE, priority=9))
        assert [type(outcomes) for outcomes in await one.place_pods([high])] == [PlacementRefused]
        await leases.waiting_pods.choose_offers(now=SystemClock().now())
        await leases.release([PodUid("uid-0")], reason="gone")
        async with asyncio.timeout(30):
            freed = await leases.capacity()
            await until(lambda: min(one.mirror.capacity, other.mirror.capacity) >= freed)

        late = await other.place_pods([pod_queued("late", SHARE)])
        offered = (await leases.waiting_pods.choose_offers(now=SystemClock().now())).pods
        answers = await one.place_pods(offered)
        after = (await leases.waiting_pods.choose_offers(now=SystemClock().now())).pods

        assert late == []
        assert [event.pod for event in offered] == ["high"]
        assert [type(outcomes) for outcomes in answers] == [PlacementChosen]
        assert after == ()
        assert [waiting.queued.pod for waiting in await leases.waiting_pods.load()] == ["late"]
