"""The watcher: the only reader of the API server's streams. It publishes and never decides."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from services.watcher.observed_pod import ObservedPod
from services.watcher.pod_groups import PodGroupChanges
from services.watcher.trackers import ForeignDeviceTracker, NodeTracker, PodEvent, PodTracker
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

Resync = PodsListed | NodeChanged | DeviceReported | QuotasUpdated | PodEvent
NodeUpdate = tuple[NodeName, NodeFacts | None, DeviceReported | None]
"""A node's facts, None if it was deleted, and the devices that another plugin registered."""

NODE_USAGE_S = 0.2
"""The interval at which changed usage of nodes is published."""
REQUEUE_DELAY_S = 0.5
"""The delay before a pod is placed again after its binding failed."""
LIST_RETRY_S = 1.0
UNEXPLAINED_S = 10.0
"""A pod that waits longer than this without a reason in its status is published again."""


class PodSource(Protocol):
    """Pods as the API server reports them: (state now, state before), now None when deleted."""

    def batches(self) -> AsyncIterator[list[tuple[ObservedPod | None, ObservedPod | None]]]:
        """Yield changes for ever; the first batches are all existing pods."""
        ...


class NodeSource(Protocol):
    """Nodes as the API server reports them."""

    def batches(self) -> AsyncIterator[list[NodeUpdate]]:
        """Yield changes for ever; the first batches are all existing nodes."""
        ...


class PodGroupSource(Protocol):
    """PodGroups as the API server reports them."""

    def batches(self) -> AsyncIterator[PodGroupChanges]:
        """Yield changes for ever; of each kind first all existing groups."""
        ...

    async def appeared(self, kinds: frozenset[PodGroupKind]) -> set[PodGroupKind]:
        """Return which absent kinds are installed by now; their changes follow."""
        ...


class PodLister(Protocol):
    """Lists bound pods as fresh as the API server can return them."""

    def chunks(self) -> AsyncIterator[PodsListed]:
        """Yield the chunks of one complete list."""
        ...


class QuotaSource(Protocol):
    """Quotas from all of their sources."""

    def batches(self) -> AsyncIterator[tuple[Quota, ...]]:
        """Yield all quotas, once they are known, and whenever they change."""
        ...


class Watcher:
    """Keeps the published state, to publish changes only. Any number of replicas may run."""

    def __init__(
        self,
        pods: PodSource,
        nodes: NodeSource,
        groups: PodGroupSource,
        lister: PodLister,
        clock: Clock,
        *,
        quotas: QuotaSource,
        resync_s: float = 300.0,
    ) -> None:
        self.pod_source = pods
        self.node_source = nodes
        self.group_source = groups
        self.quota_source = quotas
        self.quotas: tuple[Quota, ...] | None = None
        self.lister = lister
        self.clock = clock
        self.resync_s = resync_s
        self.pods = PodTracker()
        self.nodes = NodeTracker(self.pods)
        self.devices = ForeignDeviceTracker()
        self.generations = 0
        self.resync_requested = asyncio.Event()
        self.resync_requested.set()

    @emits
    async def watch_pods(self) -> AsyncIterator[Sequence[PodEvent]]:
        """Publish pods that wait and pods that have terminated."""
        async for batch in self.pod_source.batches():
            events: list[PodEvent] = []
            absent = self.pods.groups.absent_kinds(now for now, _ in batch)
            for kind in await self.group_source.appeared(absent) if absent else ():
                self.pods.groups.await_list(kind)
            for now, before in batch:
                if now is not None:
                    events += self.pods.update(now, before)
                elif before is not None:
                    events += self.pods.remove(before)
            if events:
                yield events

    @emits
    async def watch_groups(self) -> AsyncIterator[Sequence[PodEvent]]:
        """Publish pending pods again whose gang has become known or has changed."""
        async for changes in self.group_source.batches():
            events = self.pods.update_groups(changes, self._next_generation())
            if events:
                yield events

    @emits
    async def watch_quotas(self) -> AsyncIterator[Sequence[QuotasUpdated]]:
        """Publish quotas whenever they change."""
        async for quotas in self.quota_source.batches():
            self.quotas = quotas
            yield self._quotas_updated()

    @emits
    async def watch_nodes(self) -> AsyncIterator[Sequence[NodeChanged | DeviceReported]]:
        """Publish nodes, and the devices that another device plugin registered on them."""
        async for batch in self.node_source.batches():
            events: list[NodeChanged | DeviceReported] = []
            now_s = self.clock.now()
            for name, facts, devices in batch:
                if facts:
                    events += self.nodes.update(facts, now_s=now_s)
                else:
                    events += self.nodes.remove(name, now_s=now_s)
                events += self.devices.update(name, devices)
            if events:
                yield events

    @emits
    async def watch_node_usage(self) -> AsyncIterator[Sequence[NodeChanged]]:
        """Publish nodes whose pods without a lease use more or less than before."""
        while True:
            await self.clock.sleep(NODE_USAGE_S)
            changes = self.nodes.update_usage(now_s=self.clock.now())
            if changes:
                yield changes

    @emits
    async def resync(self) -> AsyncIterator[Sequence[Resync]]:
        """Publish everything at the start and on request, and bound pods every `resync_s`."""
        while True:
            if await self._wait_for_request():
                now_s = self.clock.now()
                yield [
                    *self.nodes.resync(now_s=now_s),
                    *self.devices.resync(now_s=now_s),
                    *self._quotas_updated(),
                    *self.pods.resync(self._next_generation()),
                ]
            async for chunk in self._list_with_retries():
                yield [chunk]

    async def _list_with_retries(self) -> AsyncIterator[PodsListed]:
        """Yield one complete list, after as many attempts as it takes."""
        while True:
            try:
                async for chunk in self.lister.chunks():
                    yield chunk
            except LeaseholdError as error:
                logger.warning(
                    "pods could not be listed: %s; retrying in %g s", error, LIST_RETRY_S
                )
                await self.clock.sleep(LIST_RETRY_S)
            else:
                return

    async def _wait_for_request(self) -> bool:
        """Wait for a request or for `resync_s`; return whether there was a request."""
        try:
            async with asyncio.timeout(self.resync_s):
                await self.resync_requested.wait()
        except TimeoutError:
            return False
        self.resync_requested.clear()
        return True

    @emits
    async def resync_stale(self) -> AsyncIterator[Sequence[PodEvent]]:
        """Publish pods again that wait without a reason: their first event may be lost.

        All other pending pods are published again every two minutes, so that no lost event leaves a
        pod waiting for ever.
        """
        for shard in itertools.count():
            await self.clock.sleep(UNEXPLAINED_S / 2)
            before = self.clock.now() - UNEXPLAINED_S
            events = self.pods.resync(self._next_generation(), unexplained_before=before)
            if events:
                logger.info("publishing %d pods again that wait without a reason", len(events))
            events += self.pods.resync_shard(self._next_generation(), shard)
            if events:
                yield events

    @handles
    async def request_resync(
        self, events: Sequence[ResyncRequested | LedgerRebuilt]
    ) -> list[PodTerminated]:
        """Request a resync."""
        for event in events:
            logger.info("resync: %s", event)
        self.resync_requested.set()
        return []

    @handles
    async def requeue_failed(
        self, events: Sequence[BindingFailed]
    ) -> list[PodQueued | PodRejected]:
        """Publish pods again, after a delay, whose binding failed and that are still pending."""
        await self.clock.sleep(REQUEUE_DELAY_S)
        return self.pods.requeue({event.pod for event in events}, self._next_generation())

    def _quotas_updated(self) -> list[QuotasUpdated]:
        if self.quotas is None:
            return []
        return [QuotasUpdated(quotas=self.quotas, read_at=self.clock.now())]

    def _next_generation(self) -> int:
        """Return a generation that this replica has not used before."""
        self.generations += 1
        return int(self.clock.now() * 1000) + self.generations
