"""Placers on a real ledger: several at once, without knowing of each other."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import pytest

from services.placer.service import Placer
from shared.clients.leases import RedisLeases
from shared.model.device import DeviceUse
from shared.model.events import PlacementChosen, PlacementRefused, PodQueued
from shared.model.names import NodeName, PodUid
from shared.runtime.clock import SystemClock
from tests.support.build import dice, gpu, pod_queued, request
from tests.support.ledger import assert_sound, facts, ledger, uses
from tests.support.valkey import ValkeyServer, valkey_server

SHARE = request(gpu(memory=4_000), resources={"cpu": 100, "pods": 1})


class Uncounted:
    def count(self, outcome: str, amount: int = 1) -> None:
        """Forget it."""


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with valkey_server() as running:
        yield running


@pytest.fixture
async def url(server: ValkeyServer) -> str:
    await server.ready()
    return server.url


@asynccontextmanager
async def placers(leases: RedisLeases, count: int) -> AsyncIterator[list[Placer]]:
    several = [
        Placer(leases, SystemClock(), Uncounted(), dice(seed), ttl_s=30.0) for seed in range(count)
    ]
    following = [asyncio.create_task(placer.follow()) for placer in several]
    try:
        async with asyncio.timeout(10):
            while any(placer.missing() for placer in several):
                await asyncio.sleep(0.01)
        yield several
    finally:
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)


def pods(count: int, first: int = 0) -> list[PodQueued]:
    return [pod_queued(f"uid-{first + number}", SHARE) for number in range(count)]


def mirrored(placer: Placer) -> dict[str, DeviceUse]:
    return {
        device.uuid: device.use()
        for node in placer.mirror.nodes.values()
        for device in node.devices
    }


async def until_mirrored(leases: RedisLeases, several: Sequence[Placer]) -> None:
    async with asyncio.timeout(10):
        truth = await uses(leases)
        while any(mirrored(placer) != truth for placer in several):
            await asyncio.sleep(0.01)


async def test_four_placers_fill_the_cluster_exactly_and_refuse_the_rest(url: str) -> None:
    async with (
        ledger(url, {f"n{number}": 2 for number in range(6)}) as leases,
        placers(leases, 4) as several,
    ):
        batches = [pods(16, 16 * number) for number in range(4)]

        answers = await asyncio.gather(
            *(placer.place_pods(batch) for placer, batch in zip(several, batches, strict=True))
        )

        said = [type(one) for batch in answers for one in batch]
        assert said.count(PlacementChosen) == 6 * 2 * 4
        assert said.count(PlacementRefused) == 64 - 48
        assert len(await assert_sound(leases)) == 48
        await until_mirrored(leases, several)


async def test_the_same_pods_told_to_two_placers_get_one_lease_each(url: str) -> None:
    async with ledger(url, {"a": 2, "b": 2}) as leases, placers(leases, 2) as several:
        answers = await asyncio.gather(*(placer.place_pods(pods(8)) for placer in several))

        first, second = (
            {one.lease.pod: one.lease for one in said if isinstance(one, PlacementChosen)}
            for said in answers
        )
        assert first == second
        assert len(await assert_sound(leases)) == 8


async def test_freed_capacity_reaches_a_placer_and_the_pod_that_waits(url: str) -> None:
    async with ledger(url, {"a": 1}) as leases, placers(leases, 1) as (placer,):
        await placer.place_pods(pods(4))
        assert [type(one) for one in await placer.place_pods(pods(1, 4))] == [PlacementRefused]

        await leases.release([PodUid("uid-0")], reason="gone")
        offered = await leases.offers(now=0.0)
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
        await leases.save_node(
            type(changed)(name=changed.name, allocatable=changed.allocatable, unschedulable=True)
        )
        async with asyncio.timeout(5):
            while placer.mirror.nodes[NodeName("a")].open:
                await asyncio.sleep(0.01)

        assert [type(one) for one in await placer.place_pods(pods(1))] == [PlacementRefused]
