"""A placer that follows a real ledger, which a test can make disagree."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import cast

from services.placer.metrics import DECISIONS
from services.placer.service import Placer
from shared.ledger.leases import RedisLeases
from shared.model.clock import SystemClock
from shared.model.events.node_events import DeviceReported
from shared.model.leases.lease import Lease, LeaseState, Share
from shared.model.leases.ledger import LedgerNode, LedgerSnapshot, Reservation, ReservationOutcome
from shared.model.names import Namespace, PodUid
from tests.support.build import device, dice, ledger_node
from tests.support.clock import FakeClock
from tests.support.placer.ledger import NOW, ledger
from tests.support.waiting import until


def decided(outcome: str) -> int:
    """Return how many decisions were counted so far."""
    [metric] = DECISIONS.collect()
    name = f"{metric.name}_total"
    samples = (
        sample
        for sample in metric.samples
        if (sample.name, sample.labels) == (name, {"outcome": outcome})
    )
    return sum(int(sample.value) for sample in samples)


@asynccontextmanager
async def placers(leases: RedisLeases, count: int) -> AsyncIterator[list[Placer]]:
    """Start independent placers; yield them once they can decide."""
    several = [Placer(leases, SystemClock(), dice(seed), ttl_s=30.0) for seed in range(count)]
    following = [asyncio.create_task(placer.follow_ledger()) for placer in several]
    try:
        await until(lambda: not any(placer.unready_reason() for placer in several))
        yield several
    finally:
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)


class Clock(FakeClock):
    async def sleep(self, duration_s: float) -> None:
        self.time += duration_s
        await asyncio.sleep(0)


class DisturbedLedger(RedisLeases):
    """Records each request; first replies with `outcomes`, as if other placers were faster."""

    groups: list[list[Reservation]]
    outcomes: list[ReservationOutcome]
    snapshots: int

    async def reserve(
        self, wanted: Sequence[Reservation], *, now: float, ttl_s: float
    ) -> list[ReservationOutcome]:
        self.groups.append(list(wanted))
        disturbed, self.outcomes = self.outcomes[: len(wanted)], self.outcomes[len(wanted) :]
        rest = wanted[len(disturbed) :]
        return [*disturbed, *await super().reserve(rest, now=now, ttl_s=ttl_s)]

    async def snapshot(self) -> LedgerSnapshot:
        self.snapshots += 1
        return await super().snapshot()


class Running:
    """A placer whose feed is being followed."""

    def __init__(self, opened: DisturbedLedger) -> None:
        self.ledger = opened
        self.clock = Clock(NOW)
        self.placer = Placer(opened, self.clock, dice(1), ttl_s=30.0)
        self.following = asyncio.create_task(self.placer.follow_ledger())

    async def settled(self) -> None:
        """Wait until the mirror has the ledger's present state."""
        await until(lambda: not self.placer.unready_reason())
        capacity = await self.ledger.capacity()
        await until(lambda: self.placer.mirror.capacity >= capacity)

    async def waiting(self) -> list[PodUid]:
        return [waiting_pod.queued.pod for waiting_pod in await self.ledger.waiting_pods.load()]


async def add(opened: RedisLeases, node: LedgerNode) -> None:
    """Save a node and its devices; what is used of a device is the lease of another pod."""
    await opened.save_nodes([node.facts])
    report = DeviceReported(
        node=node.facts.name,
        devices=tuple(device for device, _ in node.devices),
        served=node.served,
    )
    await opened.save_devices([report])
    for node_device, use in node.devices:
        if use.memory_mib:
            share = Share(
                container="c",
                device=node_device.uuid,
                index=node_device.index,
                memory_mib=use.memory_mib,
                cores_percent=0,
                device_mib=node_device.memory_mib,
                slot=0,
                fence=1,
            )
            other = Lease(
                pod=PodUid(f"uid-on-{node_device.uuid}"),
                namespace=Namespace("default"),
                name="other",
                node=node.facts.name,
                shares=(share,),
                state=LeaseState.BOUND,
                version=1,
            )
            assert await opened.restore([other], now=NOW) == []


@asynccontextmanager
async def running(url: str, *nodes: LedgerNode) -> AsyncIterator[Running]:
    async with ledger(url, {}, kind=DisturbedLedger) as leases:
        opened = cast(DisturbedLedger, leases)
        opened.groups = []
        opened.outcomes = []
        opened.snapshots = 0
        for node in nodes:
            await add(opened, node)
        it = Running(opened)
        try:
            await it.settled()
            yield it
        finally:
            it.following.cancel()
            await asyncio.gather(it.following, return_exceptions=True)


def two_nodes() -> tuple[LedgerNode, LedgerNode]:
    return ledger_node("n1", device("GPU-1")), ledger_node("n2", device("GPU-2"))
