"""Verdicts are decided again when only their reason has changed."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from msgspec import structs

from services.placer.service import Placer
from shared.ledger.leases import RedisLeases
from shared.model.clock import SystemClock
from shared.model.device import Device
from shared.model.events.pod_events import PlacementRefused, PodQueued
from shared.model.names import NodeName, PodUid
from shared.model.request import Gang
from tests.support.build import gpu, pod_queued, request
from tests.support.placer.ledger import device, facts, ledger, report
from tests.support.placer.placers import placers
from tests.support.waiting import until

WHOLE = request(gpu(memory=16_000), resources={"cpu": 100, "pods": 1})


def members(gang: str, size: int, least: int) -> list[PodQueued]:
    belongs = Gang(name=f"default/{gang}", min_member=least)
    return [
        pod_queued(f"{gang}-{number}", structs.replace(WHOLE, gang=belongs), created_at=number)
        for number in range(size)
    ]


async def reasons(leases: RedisLeases) -> dict[str, str]:
    return {w.queued.pod: w.refusal.reason for w in await leases.waiting_pods.load()}


async def refresh(leases: RedisLeases, placer: Placer) -> dict[str, str]:
    """Let the placer decide whatever is offered; return the reasons that it publishes."""
    published: dict[str, str] = {}
    while True:
        await follow(leases, placer)
        offers = await leases.waiting_pods.choose_offers(now=SystemClock().now())
        if not offers.pods:
            return published
        for event in await placer.place_pods(offers.pods):
            assert isinstance(event, PlacementRefused)
            published[event.pod] = event.refusal.reason


async def follow(leases: RedisLeases, placer: Placer) -> None:
    """Wait until the placer's mirror has every change of the ledger."""
    position = (await leases.snapshot()).capacity
    await until(lambda: placer.mirror.capacity >= position)


@asynccontextmanager
async def full_node(
    url: str, waiting: Sequence[PodQueued]
) -> AsyncIterator[tuple[RedisLeases, Placer]]:
    """Yield a ledger and a placer of a node `a` whose only device is taken, with waiting pods."""
    async with ledger(url, {"a": 1}) as leases, placers(leases, 1) as [placer]:
        await placer.place_pods([pod_queued("holder", WHOLE)])
        await placer.place_pods(waiting)
        await refresh(leases, placer)
        yield leases, placer


async def save(leases: RedisLeases, devices: Sequence[Device], at: float) -> None:
    await leases.save_devices([report("a", devices, at=at)])


async def test_each_change_of_a_reason_is_published_whichever_placer_decides(url: str) -> None:
    async with ledger(url, {"a": 1}) as leases, placers(leases, 2) as [first, second]:
        await first.place_pods([pod_queued("holder", WHOLE)])
        waits = pod_queued("w", WHOLE, requeue_number=1)
        published: list[str] = []

        for placer, cordon in ((first, ""), (second, "its agent does not respond"), (first, "")):
            await leases.set_cordoned({NodeName("a"): cordon})
            await follow(leases, placer)
            for event in await placer.place_pods([waits]):
                assert isinstance(event, PlacementRefused)
                published.append(event.refusal.reason)

        assert ["not ready" in reason for reason in published] == [False, True, False]


async def test_a_verdict_follows_the_cordon_of_a_node(url: str) -> None:
    async with full_node(url, [pod_queued("w", WHOLE)]) as (leases, placer):
        assert "Insufficient GPU memory" in (await reasons(leases))["w"]

        await leases.set_cordoned({NodeName("a"): "its agent does not respond"})
        assert "agent that was not ready" in (await refresh(leases, placer))["w"]

        await leases.set_cordoned({NodeName("a"): ""})
        assert "Insufficient GPU memory" in (await refresh(leases, placer))["w"]
        assert "Insufficient GPU memory" in (await reasons(leases))["w"]


async def test_a_verdict_follows_the_health_of_a_device(url: str) -> None:
    async with full_node(url, [pod_queued("w", WHOLE)]) as (leases, placer):
        await save(leases, [device("a", 0, healthy=False, fault="XID 79")], at=1.0)
        assert "unhealthy" in (await refresh(leases, placer))["w"]

        await save(leases, [device("a", 0)], at=2.0)
        assert "Insufficient GPU memory" in (await refresh(leases, placer))["w"]


async def test_a_verdict_follows_nodes_that_are_added_and_removed(url: str) -> None:
    async with full_node(url, [pod_queued("w", WHOLE)]) as (leases, placer):
        await leases.save_nodes([facts("b")])
        assert (await refresh(leases, placer))["w"].startswith("0/2 nodes")

        await leases.remove_node(NodeName("b"))
        assert (await refresh(leases, placer))["w"].startswith("0/1 nodes")


async def test_a_change_of_amounts_alone_refreshes_no_verdict(url: str) -> None:
    async with full_node(url, [pod_queued("w", WHOLE)]) as (leases, placer):
        await leases.save_nodes([facts("a", cpu=32_000)])

        assert await refresh(leases, placer) == {}


async def test_the_verdict_of_every_pod_of_a_gang_has_the_number_of_its_pods(url: str) -> None:
    pods = members("g", 3, 4)
    async with full_node(url, []) as (leases, placer):
        for pod in pods:
            await placer.place_pods([pod])
        await refresh(leases, placer)

        found = await reasons(leases)

        assert set(found.values()) == {"gang default/g needs 4 pods at once; 3 of 4 pods exist"}


async def test_the_verdicts_of_a_gang_follow_the_deletion_of_a_pod(url: str) -> None:
    pods = members("g", 3, 3)
    async with full_node(url, pods) as (leases, placer):
        assert all("0 of 3 fit" in reason for reason in (await reasons(leases)).values())

        await leases.waiting_pods.remove([PodUid("g-1")])
        published = await refresh(leases, placer)

        expected = "gang default/g needs 3 pods at once; 2 of 3 pods exist"
        assert published == {"g-0": expected, "g-2": expected}
        assert await reasons(leases) == published
