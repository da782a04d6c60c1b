"""Placers on a real ledger: several at once, without knowing of each other."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from services.placer.service import Placer
from shared.ledger.leases import RedisLeases
from shared.ledger.preemptions import Preemptions
from shared.model.clock import SystemClock
from shared.model.devices.device import Device, DeviceMode, DeviceUse, numa_cpus_name
from shared.model.devices.node import HOSTNAME, AntiAffinityTerm, LabelRequirement
from shared.model.errors import ConflictError
from shared.model.events.pod_events import PlacementChosen, PlacementRefused, PodQueued
from shared.model.leases.lease import MigPlacement
from shared.model.leases.lease_copy import dump_lease, load_lease
from shared.model.leases.preemption import StoredStart
from shared.model.names import PodUid
from shared.model.requests.request import (
    NO_TERM,
    ClaimVolume,
    NodeTerm,
    PodClaim,
    SharingPolicy,
    Term,
)
from tests.support.build import dice, gpu, mig_layout, pod_queued, request
from tests.support.placer.ledger import (
    NOW,
    assert_sound,
    device,
    facts,
    ledger,
    rebuild,
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


def volume_of(node: str) -> ClaimVolume:
    term = NodeTerm(key="metadata.name", operator="In", values=(node,), field=True)
    return ClaimVolume(name=f"disk-of-{node}", terms=((term,),))


async def test_a_lease_keeps_only_the_volumes_that_its_candidates_reach(url: str) -> None:
    nodes = [f"n{number}" for number in range(9)]
    claim = PodClaim(name="data", volumes=tuple(map(volume_of, nodes)), provisions=True)
    anywhere = ClaimVolume(name="of-all-nodes")
    shared = PodClaim(name="shared", volumes=(anywhere,))
    wanted = structs.replace(SHARE, claims=(claim, shared))
    async with ledger(url, dict.fromkeys(nodes, 1)) as leases, placers(leases, 1) as [placer]:
        await placer.place_pods([pod_queued("uid", wanted)])

        [lease] = await assert_sound(leases)

    kept, of_all = lease.claims
    assert volume_of(lease.node) in kept.volumes
    assert 1 <= len(kept.volumes) <= 3
    assert kept == structs.replace(claim, volumes=kept.volumes)
    assert of_all == shared


CPUS_OF_NUMA = [numa_cpus_name(0), numa_cpus_name(1)]


def aligned(*cpus: int) -> list[Device]:
    """Two GPUs of node a on each of two NUMA nodes with so many CPUs."""
    return [device("a", n, numa=n // 2, numa_cpus=cpus[n // 2]) for n in range(4)]


def with_cpus(count: int, cpus: int, first: int = 0) -> list[PodQueued]:
    wanted = request(gpu(memory=4_000, exclusive_cpus=cpus), resources={"cpu": 100, "pods": 1})
    return [pod_queued(f"uid-{first + number}", wanted) for number in range(count)]


async def used_cpus(leases: RedisLeases) -> list[int]:
    [[totals]] = [page async for page in leases.totals.pages()]
    return [totals.node.used.get(name, 0) for name in CPUS_OF_NUMA]


async def test_placers_together_give_no_more_cpus_of_a_numa_node_than_it_has(url: str) -> None:
    async with ledger(url, {"a": 0}) as leases:
        await leases.save_devices([report("a", aligned(5, 3))])
        await leases.save_nodes([facts("a", memory=1)])
        async with placers(leases, 2) as several:
            batches = [with_cpus(6, 2, 6 * number) for number in range(2)]
            answers = await asyncio.gather(
                *(placer.place_pods(batch) for placer, batch in zip(several, batches, strict=True))
            )
            outcomes = [type(one) for batch in answers for one in batch]
            assert outcomes.count(PlacementChosen) == 3
            assert await used_cpus(leases) == [4, 2]

            found = await assert_sound(leases)
            gone = next(lease for lease in found if CPUS_OF_NUMA[1] in lease.resources)
            await leases.release([gone.pod], reason="gone")
            offered = (await leases.waiting_pods.choose_offers(now=0.0)).pods
            await several[0].place_pods(offered)
            await several[1].place_pods(pods(1, 50))
            assert await used_cpus(leases) == [4, 2]
            found = await assert_sound(leases)
            assert len(found) == 4

        copies = [
            load_lease(dump_lease(each), namespace=each.namespace, name=each.name) for each in found
        ]
        await rebuild(leases, {}, copies, force=True)
        assert await used_cpus(leases) == [4, 2]
        await leases.save_devices([report("a", aligned(6, 1), at=NOW)])
        await leases.save_nodes([facts("a")])
        async with placers(leases, 1) as (placer,):
            answers_after = await placer.place_pods(with_cpus(2, 2, 70))
        assert [type(one) for one in answers_after] == [PlacementChosen, PlacementRefused]
        assert await used_cpus(leases) == [6, 2]


async def test_a_placer_that_is_behind_places_nothing_beside_a_pod_that_repels_it(url: str) -> None:
    selector = (LabelRequirement("app", "In", ("noisy",)),)
    term = AntiAffinityTerm(topology_key=HOSTNAME, selector=selector, all_namespaces=True)
    noisy = replace(pods(1)[0], labels={"app": "noisy"})
    async with ledger(url, {"a": 1}) as leases:
        await leases.save_nodes([replace(facts("a"), labels={HOSTNAME: "a"})])
        placer = Placer(leases, SystemClock(), dice(1), ttl_s=30.0)
        await read_once(placer)
        await reserve(leases, structs.replace(reservation("quiet", share("a")), repels=(term,)))

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


LAYOUTS = (
    mig_layout("sevenths", (5_120, 7)),
    mig_layout("mixed", (10_240, 3), (5_120, 1)),
    mig_layout("halves", (20_480, 2)),
    mig_layout("whole", (40_960, 1)),
)


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


async def test_pods_that_end_before_a_planned_start_get_its_devices_until_then(url: str) -> None:
    async with (
        ledger(url, {"a": 1}) as leases,
        Preemptions.connect(url, prefix=leases._connection.prefix) as preemptions,
        placers(leases, 1) as [placer],
    ):
        planned = reservation("planned", share("a", 0, mib=16_000))
        start = StoredStart(
            id="planned",
            wanted=(planned,),
            at_once=({},),
            waits_for=(),
            at=time.time() + 3600,
            enforced=True,
        )
        assert await preemptions.open_start(start)
        await until_mirrored(leases, [placer])
        long = Term(max_run_s=3600)
        short = Term(max_run_s=600)

        refused = [
            await placer.place_pods([pod_queued(uid, structs.replace(SHARE, term=term))])
            for uid, term in (("endless", NO_TERM), ("long", long))
        ]
        [placed] = await placer.place_pods(
            [pod_queued("short", structs.replace(SHARE, term=short))]
        )

        for [each] in refused:
            assert isinstance(each, PlacementRefused)
            assert dict(each.refusal.counts) == {"GpuClaimed": 1}
        assert isinstance(placed, PlacementChosen)
        assert placed.lease.shares[0].device == "GPU-a-0"
