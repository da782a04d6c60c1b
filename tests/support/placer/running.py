"""A placer that follows a ledger made of lists."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from msgspec import structs

from services.placer.service import Placer
from shared.model.lease import Lease
from shared.model.ledger import (
    GangEnrollment,
    LedgerChange,
    LedgerNode,
    LedgerSnapshot,
    Reservation,
    ReservationOutcome,
    Reserved,
    WaitingPod,
    WaitResult,
)
from shared.model.names import PodUid
from shared.model.request import Gang
from tests.support.build import device, dice, ledger_node
from tests.support.clock import FakeClock
from tests.support.placer.placers import FakePlacerMetrics


class Clock(FakeClock):
    async def sleep(self, duration_s: float) -> None:
        self.time += duration_s
        await asyncio.sleep(0)


class FakeLedger:
    """Grants the first candidate unless `outcomes` are set; records each request."""

    def __init__(self, *nodes: LedgerNode) -> None:
        self.nodes = nodes
        self.groups: list[list[Reservation]] = []
        self.gangs: list[Gang] = []
        self.waiting: list[WaitingPod] = []
        self.stale_once: set[PodUid] = set()
        self.leases: list[Lease] = []
        self.outcomes: list[ReservationOutcome] = []
        """Outcomes of the next reservations, in order; empty: they are granted."""
        self.feed: asyncio.Queue[list[LedgerChange] | Exception] = asyncio.Queue()
        self.snapshots = 0

    async def reserve(
        self, wanted: Sequence[Reservation], *, now: float, ttl_s: float
    ) -> list[ReservationOutcome]:
        self.groups.append(list(wanted))
        return [self.outcomes.pop(0) if self.outcomes else granted(one, 0) for one in wanted]

    async def reserve_gang(
        self, gang: Gang, wanted: Sequence[Reservation], *, now: float, ttl_s: float
    ) -> list[ReservationOutcome]:
        self.gangs.append(gang)
        return await self.reserve(wanted, now=now, ttl_s=ttl_s)

    async def reserve_further(
        self, gang: Gang, wanted: Sequence[Reservation], *, now: float, ttl_s: float
    ) -> list[ReservationOutcome]:
        return await self.reserve(wanted, now=now, ttl_s=ttl_s)

    @property
    def waiting_pods(self) -> "FakeLedger":
        return self

    async def enroll(self, gang: Gang, enrolled: Sequence[WaitingPod]) -> GangEnrollment:
        return GangEnrollment(live_count=0, waiting_count=len(enrolled), waiting=tuple(enrolled))

    async def enqueue(self, verdicts: Sequence[WaitingPod]) -> WaitResult:
        leases = tuple(
            lease for lease in self.leases if lease.pod in {v.queued.pod for v in verdicts}
        )
        if leases:
            return WaitResult(already_leased=leases)
        self.waiting += verdicts
        stale = [v.queued.pod for v in verdicts if v.queued.pod in self.stale_once]
        self.stale_once.clear()
        return WaitResult(stale=tuple(stale))

    async def snapshot(self) -> LedgerSnapshot:
        self.snapshots += 1
        return LedgerSnapshot(position="1", capacity=7, nodes=self.nodes)

    async def changes(self, position: str) -> AsyncIterator[list[LedgerChange]]:
        while True:
            item = await self.feed.get()
            if isinstance(item, Exception):
                raise item
            yield item


def granted(one: Reservation, which: int) -> Reserved:
    placement = one.candidates[which]
    return Reserved(
        lease=Lease(
            pod=one.pod,
            namespace=one.namespace,
            name=one.name,
            node=placement.node,
            shares=tuple(structs.replace(share, fence=1) for share in placement.shares),
            resources=one.resources,
            version=1,
        )
    )


class Running:
    """A placer whose feed is being followed."""

    def __init__(self, *nodes: LedgerNode) -> None:
        self.ledger = FakeLedger(*nodes)
        self.clock = Clock()
        self.metrics = FakePlacerMetrics()
        self.placer = Placer(self.ledger, self.clock, self.metrics, dice(1), ttl_s=30.0)

    async def __aenter__(self) -> "Running":
        self.following = asyncio.create_task(self.placer.follow_ledger())
        await self.settled()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.following.cancel()
        await asyncio.gather(self.following, return_exceptions=True)

    async def settled(self) -> None:
        async with asyncio.timeout(30):
            while self.placer.unready_reason() or not self.ledger.feed.empty():
                await asyncio.sleep(0)
        for _ in range(3):
            await asyncio.sleep(0)


def two_nodes() -> tuple[LedgerNode, LedgerNode]:
    return ledger_node("n1", device("GPU-1")), ledger_node("n2", device("GPU-2"))
