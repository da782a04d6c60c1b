"""Gangs through four placers, a real work queue and a real ledger: all or nothing, no deadlock."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest
from msgspec import structs

from services.placer.service import Placer
from shared.ledger.leases import RedisLeases
from shared.model.clock import SystemClock
from shared.model.events.pod_events import PlacementChosen, PodQueued
from shared.model.leases.lease import LeaseState
from shared.model.names import NodeName, PodUid
from shared.model.requests.request import Gang, PodRequest
from shared.nats.bus import Bus
from shared.runtime.runner import Runner
from shared.runtime.telemetry import Tracing
from tests.support.build import dice, gpu, pod_queued, request
from tests.support.placer.ledger import assert_sound, facts, ledger
from tests.support.placer.running import decided, placers
from tests.support.servers.nats import NatsServer, nats_server
from tests.support.servers.valkey import ValkeyServer
from tests.support.waiting import until

PLACERS = 4
DEVICE_MIB = 16_000


@dataclass(frozen=True)
class World:
    """Four placers that share a ledger and a queue; the test is the watcher and the binder."""

    leases: RedisLeases
    bus: Bus
    gone_before: int

    async def queue(self, events: Sequence[PodQueued]) -> None:
        """Tell of pods, each in a message of its own."""
        for event in events:
            await self.bus.publish([event])

    async def leased(self) -> Counter[str]:
        """Count live leases by gang, at one moment."""
        return Counter(
            {gang: len(pods) for gang, pods in (await self.leases.totals.gangs()).items()}
        )

    async def end(self, gang: str) -> None:
        pods = (await self.leases.totals.gangs())[gang]
        await self.leases.release(sorted(pods), reason="the gang is done")

    async def offer(self) -> int:
        """Offer what was freed, as the binder does; return to how many."""
        offers = await self.leases.waiting_pods.choose_offers(now=SystemClock().now())
        await self.bus.publish(offers.pods)
        return len(offers.pods)

    async def until(self, wanted: Counter[str], *, offering: bool = True) -> None:
        """Wait until gangs have so many leases, and never a part of them."""

        async def leased_and_waiting() -> tuple[Counter[str], dict[PodUid, str]]:
            leased = await self.leased()
            if offering and leased != wanted:
                await self.offer()
            waiting = await self.leases.waiting_pods.load()
            return leased, {each.queued.pod: each.refusal.reason for each in waiting}

        await until(leased_and_waiting, lambda found: found[0] == wanted)

    async def decided(self, pods: Sequence[PodQueued]) -> None:
        """Wait until each of these pods waits, holds a lease, or was dropped because it is gone."""

        async def undecided() -> set[PodUid]:
            gangs = await self.leases.totals.gangs()
            known = {each.queued.pod for each in await self.leases.waiting_pods.load()}
            return {pod.pod for pod in pods}.difference(known, *gangs.values())

        await until(undecided, lambda left: len(left) <= decided("gone") - self.gone_before)

    async def settled(self, pods: int) -> None:
        """Wait until every pod either holds a lease or waits with a verdict on its gang."""

        async def is_settled() -> bool:
            waiting = await self.leases.waiting_pods.load()
            decided = [w for w in waiting if "counted" not in w.refusal.reason]
            leased = sum((await self.leased()).values())
            return len(decided) + leased == pods and len(waiting) == len(decided)

        await until(is_settled)


@asynccontextmanager
async def world(server: ValkeyServer, nats: NatsServer, nodes: int) -> AsyncIterator[World]:
    await server.ready()
    async with (
        ledger(server.url, {f"n{number}": 2 for number in range(nodes)}) as leases,
        Bus.connect(nats.url, name="test") as bus,
    ):
        gone_before = decided("gone")
        placers = [Placer(leases, SystemClock(), dice(seed), ttl_s=30.0) for seed in range(PLACERS)]
        started = [asyncio.Event() for _ in placers]
        tasks = [
            asyncio.create_task(Runner("placer", placer, bus, Tracing("placer", None)).run(begun))
            for placer, begun in zip(placers, started, strict=True)
        ]
        try:
            async with asyncio.timeout(30):
                await asyncio.gather(*(begun.wait() for begun in started))
                await until(lambda: not any(placer.unready_reason() for placer in placers))
            yield World(leases, bus, gone_before)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def requesting(mib: int) -> PodRequest:
    return request(gpu(memory=mib), resources={"cpu": 100, "pods": 1})


def gang(name: str, size: int, mib: int, *, least: int | None = None) -> list[PodQueued]:
    belongs = Gang(name=f"default/{name}", min_member=size if least is None else least)
    return [
        pod_queued(
            f"{name}-{number}", structs.replace(requesting(mib), gang=belongs), created_at=number
        )
        for number in range(size)
    ]


def shuffled(pods: Sequence[PodQueued], seed: int) -> list[PodQueued]:
    mixed = list(pods)
    random.Random(seed).shuffle(mixed)  # noqa: S311
    return mixed


async def test_many_gangs_run_one_after_the_other_and_none_is_ever_reserved_in_part(
    server: ValkeyServer,
) -> None:
    chance = random.Random(7)  # noqa: S311
    sizes = {f"g{number}": chance.randint(2, 8) for number in range(12)}
    pods = [pod for name, size in sizes.items() for pod in gang(name, size, DEVICE_MIB // 2)]
    left = {f"default/{name}": size for name, size in sizes.items()}
    async with nats_server() as nats, world(server, nats, 2) as it:
        await it.queue(shuffled(pods, 3))

        async def end_leased() -> dict[str, int]:
            for name, leased in (await it.leased()).items():
                assert leased == left.pop(name)
                await it.end(name)
            await it.offer()
            return left

        await until(end_leased, lambda left: not left)

        assert await assert_sound(it.leases) == []


async def test_a_gang_waits_for_its_pods_and_the_reason_is_published(server: ValkeyServer) -> None:
    pods = gang("a", 4, 4_000)
    async with nats_server() as nats, world(server, nats, 1) as it:
        await it.queue(pods[:3])
        await it.settled(3)
        refusals = [w.refusal for w in await it.leases.waiting_pods.load()]
        assert await it.leased() == {}
        assert any(why.hint.startswith("create 1 more, or ") for why in refusals)
        assert max(why.reason for why in refusals) == (
            "gang default/a needs 4 pods at once; 3 of 4 pods exist"
        )

        await it.queue(pods[3:])

        await it.until(Counter({"default/a": 4}))


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (1, 2, 0)], ids=str)
async def test_a_gang_whose_pods_name_different_minimums_starts_with_the_largest(
    server: ValkeyServer, order: Sequence[int]
) -> None:
    *workers, last = gang("a", 3, 4_000, least=4)
    pods = [*gang("leader", 1, 4_000, least=2), *workers]
    leader = Gang(name="default/a", min_member=2)
    pods[0] = replace(pods[0], request=structs.replace(pods[0].request, gang=leader))
    async with nats_server() as nats, world(server, nats, 1) as it:
        for number in order:
            await it.queue([pods[number]])
            await it.decided([pods[number]])
        await it.queue([replace(pods[0], requeue_number=-1)])

        async def reasons() -> set[str]:
            return {w.refusal.reason for w in await it.leases.waiting_pods.load()}

        numbers = "min-available is 2 in pod leader-0 and 4 in pod a-0: the largest counts"
        await until(
            reasons,
            lambda read: (
                read == {f"gang default/a needs 4 pods at once; 3 of 4 pods exist; {numbers}"}
            ),
        )
        assert await it.leased() == {}

        await it.queue([last])

        await it.until(Counter({"default/a": 4}))


async def test_a_running_gang_accepts_further_pods_and_replacements_one_by_one(
    server: ValkeyServer,
) -> None:
    pods = gang("a", 6, DEVICE_MIB // 2, least=3)
    async with nats_server() as nats, world(server, nats, 1) as it:
        await it.queue(pods)
        await it.until(Counter({"default/a": 4}))
        await it.settled(6)
        await it.leases.bind(await assert_sound(it.leases))
        living = [lease.pod for lease in await assert_sound(it.leases)]

        await it.leases.release([PodUid(living[0])], reason="it died")

        await it.until(Counter({"default/a": 4}))
        now = await assert_sound(it.leases)
        assert {lease.state for lease in now} == {LeaseState.BOUND, LeaseState.RESERVED}
        await it.leases.release([lease.pod for lease in now], reason="all died")
        await it.settled(1)
        assert await it.leased() == {}
        replacements = [replace(pod, pod=PodUid(f"new-{pod.pod}")) for pod in pods[:2]]

        await it.queue(replacements)

        await it.until(Counter({"default/a": 3}))


@pytest.mark.parametrize(
    "steps",
    [
        ("queued", "gone", "others"),
        ("gone", "queued", "others"),
        ("gone", "others", "queued"),
        ("queued", "others", "gone"),
        ("others", "queued", "gone"),
    ],
    ids="-".join,
)
async def test_a_gang_never_begins_with_a_pod_that_is_gone(
    server: ValkeyServer, steps: Sequence[str]
) -> None:
    ghost, *others, last = gang("a", 4, 4_000, least=3)
    async with nats_server() as nats, world(server, nats, 1) as it:
        for step in steps:
            match step:
                case "queued":
                    await it.queue([ghost])
                    await it.decided([ghost])
                case "gone":
                    await it.leases.waiting_pods.remove([ghost.pod])
                    ended = await it.leases.release([ghost.pod], reason="the pod was deleted")
                    released = {lease.pod for lease in ended}
                    await it.queue(
                        [replace(pod, requeue_number=-1) for pod in others if pod.pod in released]
                    )
                case "others":
                    await it.queue(others)
                    await it.decided(others)
        await it.settled(2)
        assert await it.leased() == {}
        assert {w.queued.pod for w in await it.leases.waiting_pods.load()} == {
            pod.pod for pod in others
        }
        await it.queue([last])
        await it.until(Counter({"default/a": 3}))


async def test_a_repeated_event_of_a_running_pod_is_decided_although_others_of_its_gang_have_ended(
    server: ValkeyServer,
) -> None:
    pods = gang("g", 3, 4_000)
    async with ledger(server.url, {"a": 1}) as leases, placers(leases, 1) as [placer]:
        chosen = await placer.place_pods(pods)
        await leases.bind([event.lease for event in chosen if isinstance(event, PlacementChosen)])
        await leases.activate([(pod.pod, NodeName("a")) for pod in pods])
        await leases.release([pods[0].pod], reason="it has succeeded")

        repeated = await placer.place_pods([pods[1], pod_queued("other", requesting(4_000))])

        assert [type(event) for event in repeated] == [PlacementChosen]
        assert (await leases.totals.gangs())["default/g"] == {pods[1].pod, pods[2].pod}


async def test_leases_of_a_gang_that_was_just_placed_are_not_published_by_each_of_its_events(
    server: ValkeyServer,
) -> None:
    pods = gang("g", 3, 4_000)
    async with ledger(server.url, {"a": 1}) as leases, placers(leases, 2) as [placer, another]:
        chosen = await placer.place_pods(pods)

        copies = await another.place_pods([pods[1]])
        again = await another.place_pods([replace(pods[1], requeue_number=1)])
        another.rounds.forget_published([pod.pod for pod in pods])
        after_failure = await another.place_pods([pods[1]])

        assert len(chosen) == 3
        assert copies == []
        published = [event.lease.pod for event in again if isinstance(event, PlacementChosen)]
        assert published == [pods[1].pod]
        assert len(after_failure) == 3


async def test_all_pods_of_a_gang_run_in_one_rack_also_those_that_come_later(
    server: ValkeyServer,
) -> None:
    rack_of = {f"n{number}": f"r{number % 2}" for number in range(4)}
    pods = [
        replace(pod, request=structs.replace(pod.request, gang=in_rack(pod)))
        for pod in gang("a", 6, DEVICE_MIB, least=3)
    ]
    async with nats_server() as nats, world(server, nats, 4) as it:
        nodes = [replace(facts(name), labels={RACK: rack}) for name, rack in rack_of.items()]
        await it.leases.save_nodes(nodes)
        await it.queue(shuffled(pods, 5))
        await it.until(Counter({"default/a": 4}))
        await it.settled(6)
        running = await assert_sound(it.leases)
        await it.leases.bind(running)
        reasons = {waiting.refusal.reason for waiting in await it.leases.waiting_pods.load()}

        await it.leases.release([running[0].pod], reason="it died")

        await it.until(Counter({"default/a": 4}))
        now = await assert_sound(it.leases)

    racks = [{rack_of[lease.node] for lease in leases} for leases in (running, now)]
    assert len(racks[0]) == 1
    assert racks[1] == racks[0]
    (rack,) = racks[0]
    assert all(f"2 node(s) were not in {RACK} {rack}" in reason for reason in reasons)


RACK = "example.com/rack"


def in_rack(pod: PodQueued) -> Gang:
    assert pod.request.gang is not None
    return structs.replace(pod.request.gang, required_topology=(RACK,))
