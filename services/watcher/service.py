"""The watcher: the only reader of the API server's streams. It tells; it never decides."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from services.watcher.changes import ForeignDevices, Nodes, PodEvent, Pods
from services.watcher.observed_pod import PodSeen
from services.watcher.pod_groups import GroupNews
from shared.dialects.pod_groups import PodGroupKind
from shared.model.clock import Clock
from shared.model.errors import LeaseholdError
from shared.model.events.node_events import DeviceReported
from shared.model.events.pod_events import (
    BindingFailed,
    LedgerRebuilt,
    NodeChanged,
    PodQueued,
    PodRejected,
    PodsListed,
    PodTerminated,
    QuotasUpdated,
    ResyncRequested,
)
from shared.model.names import NodeName
from shared.model.node import NodeFacts
from shared.model.quota import Quota
from shared.runtime.service import emits, handles

logger = logging.getLogger(__name__)

ToldAgain = PodsListed | NodeChanged | DeviceReported | QuotasUpdated | PodEvent

OCCUPATION_S = 0.2
"""Changes of what pods take of a node are gathered for this long."""
AGAIN_S = 0.5
"""A pod whose binding failed is placed again no faster than this."""
LIST_AGAIN_S = 1.0
UNEXPLAINED_S = 10.0
"""A pod that waits longer than this without a word is told of again."""


class PodSource(Protocol):
    """Pods as the API server tells them: (state now, state before), now None when gone."""

    def batches(self) -> AsyncIterator[list[tuple[PodSeen | None, PodSeen | None]]]:
        """Yield changes for ever; the first batches are everything that exists."""
        ...


class NodeSource(Protocol):
    """Nodes as the API server tells them; no facts when gone."""

    def batches(
        self,
    ) -> AsyncIterator[list[tuple[NodeName, NodeFacts | None, DeviceReported | None]]]:
        """Yield changes for ever; the first batches are everything that exists."""
        ...


class GroupSource(Protocol):
    """PodGroups as the API server tells them."""

    def batches(self) -> AsyncIterator[GroupNews]:
        """Yield changes for ever; of each kind first everything that exists."""
        ...

    async def appeared(self, kinds: frozenset[PodGroupKind]) -> set[PodGroupKind]:
        """Look whether kinds that were absent have appeared; their news follow."""
        ...


class Listing(Protocol):
    """A list of bound pods as fresh as the API server can give it."""

    def pieces(self) -> AsyncIterator[PodsListed]:
        """Yield the pieces of one complete list."""
        ...


class QuotaSource(Protocol):
    """Quotas, wherever they are written."""

    def batches(self) -> AsyncIterator[tuple[Quota, ...]]:
        """Yield all quotas, once they are known, and whenever they change."""
        ...


class Watcher:
    """Keeps what is needed to tell news from repetition. Any number of replicas may run."""

    def __init__(
        self,
        pods: PodSource,
        nodes: NodeSource,
        groups: GroupSource,
        listing: Listing,
        clock: Clock,
        *,
        quotas: QuotaSource,
        listing_s: float = 300.0,
    ) -> None:
        self.pod_source = pods
        self.node_source = nodes
        self.group_source = groups
        self.quota_source = quotas
        self.quotas: tuple[Quota, ...] | None = None
        self.listing = listing
        self.clock = clock
        self.listing_s = listing_s
        self.pods = Pods()
        self.nodes = Nodes(self.pods)
        self.devices = ForeignDevices()
        self.tellings = 0
        self.listing_wanted = asyncio.Event()
        self.listing_wanted.set()

    @emits
    async def watch_pods(self) -> AsyncIterator[Sequence[PodEvent]]:
        """Tell of pods that wait and of pods that are gone."""
        async for batch in self.pod_source.batches():
            events: list[PodEvent] = []
            absent = self.pods.groups.absent(now for now, _ in batch)
            for kind in await self.group_source.appeared(absent) if absent else ():
                self.pods.groups.expect(kind)
            for now, before in batch:
                if now is not None:
                    events += self.pods.see(now, before)
                elif before is not None:
                    events += self.pods.miss(before)
            if events:
                yield events

    @emits
    async def watch_groups(self) -> AsyncIterator[Sequence[PodEvent]]:
        """Tell again of waiting pods whose gang has become known, or another."""
        async for news in self.group_source.batches():
            events = self.pods.hear_groups(news, self._number())
            if events:
                yield events

    @emits
    async def watch_quotas(self) -> AsyncIterator[Sequence[QuotasUpdated]]:
        """Tell of quotas whenever they change."""
        async for quotas in self.quota_source.batches():
            self.quotas = quotas
            yield self._told_quotas()

    @emits
    async def watch_nodes(self) -> AsyncIterator[Sequence[NodeChanged | DeviceReported]]:
        """Tell of nodes, and of devices that another device plugin registered there."""
        async for batch in self.node_source.batches():
            events: list[NodeChanged | DeviceReported] = []
            now_s = self.clock.now()
            for name, facts, devices in batch:
                if facts:
                    events += self.nodes.see(facts, now_s=now_s)
                else:
                    events += self.nodes.miss(name, now_s=now_s)
                events += self.devices.see(name, devices)
            if events:
                yield events

    @emits
    async def watch_occupation(self) -> AsyncIterator[Sequence[NodeChanged]]:
        """Tell of nodes whose other pods take more or less than before."""
        while True:
            await self.clock.sleep(OCCUPATION_S)
            changes = self.nodes.occupied(now_s=self.clock.now())
            if changes:
                yield changes

    @emits
    async def list_pods(self) -> AsyncIterator[Sequence[ToldAgain]]:
        """Tell all bound pods at the start, when somebody wants them, and now and then."""
        while True:
            if await self._wanted():
                now_s = self.clock.now()
                nodes, devices = self.nodes.all(now_s=now_s), self.devices.all(now_s=now_s)
                yield [*nodes, *devices, *self._told_quotas(), *self._again()]
            async for piece in self._list_surely():
                yield [piece]

    async def _list_surely(self) -> AsyncIterator[PodsListed]:
        """Yield one complete listing, however often it has to be asked for."""
        while True:
            try:
                async for piece in self.listing.pieces():
                    yield piece
            except LeaseholdError as error:
                logger.warning("no listing: %s; again in %g s", error, LIST_AGAIN_S)
                await self.clock.sleep(LIST_AGAIN_S)
            else:
                return

    async def _wanted(self) -> bool:
        """Wait until somebody wants a listing, or one is due; say whether somebody did."""
        try:
            async with asyncio.timeout(self.listing_s):
                await self.listing_wanted.wait()
        except TimeoutError:
            return False
        self.listing_wanted.clear()
        return True

    @emits
    async def remind(self) -> AsyncIterator[Sequence[PodEvent]]:
        """Tell again of pods that have waited without a word: the first telling may be lost.

        The others have their turn every two minutes: whatever was lost, no pod is forgotten.
        """
        for turn in itertools.count():
            await self.clock.sleep(UNEXPLAINED_S / 2)
            events = self._again(unexplained_before=self.clock.now() - UNEXPLAINED_S)
            if events:
                logger.info("telling again of %d pods that nobody explained", len(events))
            events += self.pods.take_turn(self._number(), turn)
            if events:
                yield events

    @handles
    async def want_listing(
        self, events: Sequence[ResyncRequested | LedgerRebuilt]
    ) -> list[PodTerminated]:
        """Remember that everything is to be told again."""
        for event in events:
            logger.info("everything is told again: %s", event)
        self.listing_wanted.set()
        return []

    @handles
    async def queue_again(self, events: Sequence[BindingFailed]) -> list[PodQueued | PodRejected]:
        """Tell again, after a moment, of pods whose binding came to nothing and who still wait."""
        await self.clock.sleep(AGAIN_S)
        return self.pods.tell({event.pod for event in events}, self._number())

    def _again(self, *, unexplained_before: float | None = None) -> list[PodEvent]:
        return self.pods.again(self._number(), unexplained_before=unexplained_before)

    def _told_quotas(self) -> list[QuotasUpdated]:
        if self.quotas is None:
            return []
        return [QuotasUpdated(quotas=self.quotas, read_at=self.clock.now())]

    def _number(self) -> int:
        """Return what no telling was numbered with before."""
        self.tellings += 1
        return int(self.clock.now() * 1000) + self.tellings
