"""The watcher: publishes the API server's streams, and decides nothing.

It writes only the condition of Kubernetes' PodGroups.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from services.watcher.claim_sources import ClaimReflector, DeviceClassReflector
from services.watcher.claiming_pods import ClaimingEvent, ClaimingPods
from services.watcher.kept_objects import Room
from services.watcher.metrics import show_left_out
from services.watcher.node_sources import NodeReflector
from services.watcher.node_trackers import ForeignDeviceTracker, NodeTracker
from services.watcher.pod_group_sources import PodGroupConditions, PodGroupReflectors
from services.watcher.pod_sources import ManagedPodLister, NamespaceReflector, PodReflector
from services.watcher.pod_spans import PodSpans
from services.watcher.pod_tracker import FIRST_PAUSE_S, BindingBackoff, PodEvent, PodTracker
from services.watcher.quota_sources import QuotaReflectors
from services.watcher.storage_sources import StorageReflectors
from shared.model.budgets.quota import Quota
from shared.model.clock import Clock, wait_for_event
from shared.model.errors import LeaseholdError
from shared.model.events.claim_events import AllocatedClaim, ClaimAllocated, ClaimDeallocated
from shared.model.events.node_events import DevicesRegistered
from shared.model.events.pod_events import (
    BindingFailed,
    LedgerRebuilt,
    NodeChanged,
    NodesListed,
    PodHandedOver,
    PodQueued,
    PodRejected,
    PodsListed,
    QuotasUpdated,
    ResyncRequested,
)
from shared.model.names import PodUid
from shared.runtime.service import emits, handles, loops

ClaimEvent = ClaimAllocated | ClaimDeallocated
UNANSWERED_CALLS = 1
logger = logging.getLogger(__name__)
Resync = (
    PodsListed
    | NodesListed
    | NodeChanged
    | DevicesRegistered
    | QuotasUpdated
    | PodEvent
    | ClaimAllocated
    | ClaimDeallocated
)
GATHER_PODS_S = 0.003
"""After a message with pods, those that appear within this time share the next one."""
GATHER_STORAGE_S = 0.05
"""The delay of pods whose claims or volumes have changed, so that many are published together."""
PAUSE_A_POD_S = 0.001
"""The further delay per waiting pod, which takes about a tenth of it."""
GATHER_CLAIMING_S = 0.2
"""The delay of pods of other schedulers that wait for ResourceClaims, so that many are published
together."""
NODE_USAGE_S = 0.2
"""The delay of changed usage of nodes, so that many changes are published together."""
LIST_RETRY_S = 1.0
"""Pause after pods could not be listed."""
UNEXPLAINED_S = 10.0
"""A pod that waits longer than this without a reason in its status is published again."""


class ClaimTracker:
    def __init__(self) -> None:
        self.allocated: dict[PodUid, AllocatedClaim] = {}
        self._unanswered: dict[PodUid, int] = {}

    def update(self, claim: PodUid, now: AllocatedClaim | None) -> list[ClaimEvent]:
        """`now` is None if it was deleted, or has no allocation of ours."""
        before = self.allocated.pop(claim, None)
        if now is not None:
            self.allocated[claim] = now
        same = now is not None and before is not None and now.generation == before.generation
        events: list[ClaimEvent] = []
        if before is not None and not same:
            events.append(_deallocated(before))
        if now is not None and not (same and before is not None and _is_served(now, before)):
            events.append(ClaimAllocated(claim=now))
        return events

    def resync(self) -> list[ClaimEvent]:
        return [ClaimAllocated(claim=claim) for claim in self.allocated.values()]

    def resync_unanswered(self) -> list[ClaimEvent]:
        """Publish claims without an answer at the last call, since an event may be lost."""
        self._unanswered = {
            uid: self._unanswered.get(uid, 0) + 1
            for uid, claim in self.allocated.items()
            if not claim.answer
        }
        return [
            ClaimAllocated(claim=self.allocated[uid])
            for uid, calls in self._unanswered.items()
            if calls > UNANSWERED_CALLS
        ]


def _is_served(now: AllocatedClaim, before: AllocatedClaim) -> bool:
    return now.consumers == before.consumers and (bool(now.answer) or not before.answer)


def _deallocated(claim: AllocatedClaim) -> ClaimDeallocated:
    return ClaimDeallocated(
        claim=claim.claim,
        namespace=claim.namespace,
        name=claim.name,
        node=claim.node,
        generation=claim.generation,
    )


@dataclass(eq=False, kw_only=True)
class Watcher:
    """Any number of replicas may run."""

    pod_source: PodReflector
    node_source: NodeReflector
    group_source: PodGroupReflectors
    group_conditions: PodGroupConditions
    namespace_source: NamespaceReflector
    quota_source: QuotaReflectors
    claim_source: ClaimReflector
    class_source: DeviceClassReflector
    storage_source: StorageReflectors
    lister: ManagedPodLister
    clock: Clock
    resync_s: float = 300.0
    spans: PodSpans | None = None
    """None if tracing is off."""

    def __post_init__(self) -> None:
        self.claims = ClaimTracker()
        self.claiming = ClaimingPods()
        self.claiming_changed = asyncio.Event()
        self.quotas: tuple[Quota, ...] | None = None
        self.pods = PodTracker()
        self.nodes = NodeTracker(self.pods)
        self.devices = ForeignDeviceTracker()
        self.failed_bindings = BindingBackoff()
        self.generations = 0
        self.unanswered_requests: set[str] = set()
        self.usage_changed = asyncio.Event()
        self.storage_changed = asyncio.Event()
        self.resync_requested = asyncio.Event()
        self.resync_requested.set()

    @emits
    async def watch_pods(self) -> AsyncIterator[Sequence[PodEvent | NodeChanged]]:
        """Namespaces come first: they decide what nodes repel."""
        await self.namespace_source.synced.wait()
        async for batch in self.pod_source.batches():
            events: list[PodEvent | NodeChanged] = []
            if self.spans is not None:
                self.spans.observe(batch)
            self.group_conditions.observe(batch)
            self.claiming.observe(batch)
            self._announce_claiming()
            absent = self.pods.groups.absent_kinds(now for now, _ in batch)
            for kind in await self.group_source.appeared(absent) if absent else ():
                self.pods.groups.await_list(kind)
            for now, before in batch:
                if now is not None:
                    events += self.pods.update(now, before)
                    events += self.nodes.unknown_resources(now) if before is None else ()
                elif before is not None:
                    events += self.pods.remove(before)
            events += self._requeued()
            self.pods.revision = self.pod_source.revision
            self._forget_revisions(self.pod_source.restored)
            if self.pods.has_urgent_changes:
                events += self.nodes.update_usage()
            self._announce_usage()
            self._announce_storage()
            if events:
                yield events
                await self.clock.sleep(GATHER_PODS_S)

    @loops
    async def watch_namespaces(self) -> None:
        async for changes in self.namespace_source.batches():
            self.pods.update_namespaces(changes)
            self._announce_usage()

    @emits
    async def watch_selected(self) -> AsyncIterator[Sequence[PodEvent]]:
        while True:
            await self.clock.sleep(1.0)
            self.pods.selected.advance(self.pods.observed)
            if self.pods.selected.changed:
                events = self.pods.update_selected(self._next_generation())
                if events:
                    yield events

    @emits
    async def watch_groups(self) -> AsyncIterator[Sequence[PodEvent]]:
        async for changes in self.group_source.batches():
            self.group_conditions.retry(name for name, _ in changes.groups)
            events = self.pods.update_groups(changes, self._next_generation())
            _report_left_out(self.pods.groups.rooms[changes.kind])
            if events:
                yield events

    @loops
    async def watch_storage(self) -> None:
        async for changes in self.storage_source.batches():
            self.pods.update_storage(changes)
            _report_left_out(self.pods.storage.rooms.get(changes.kind))
            self._announce_storage()
            self._announce_usage()

    @emits
    async def watch_claiming_pods(self) -> AsyncIterator[Sequence[PodEvent]]:
        while True:
            await self.storage_changed.wait()
            self.storage_changed.clear()
            await self.clock.sleep(GATHER_STORAGE_S + self.pods.claiming_pods * PAUSE_A_POD_S)
            events = self.pods.update_claiming(self._next_generation())
            if events:
                yield events

    @loops(every_s=1.0)
    async def write_group_conditions(self) -> None:
        await self.group_conditions.write(self.pods.groups, self.clock.now())

    @emits
    async def watch_quotas(self) -> AsyncIterator[Sequence[QuotasUpdated]]:
        async for quotas in self.quota_source.batches():
            self.quotas = quotas
            yield self._quotas_updated()

    @emits
    async def watch_claims(self) -> AsyncIterator[Sequence[ClaimAllocated | ClaimDeallocated]]:
        async for batch in self.claim_source.batches():
            events: list[ClaimEvent] = []
            for update in batch:
                events += self.claims.update(update.claim, update.allocation)
            self.claiming.update_claims(batch)
            _report_left_out(self.claiming.room)
            self._announce_claiming()
            if events:
                yield events

    @loops
    async def watch_classes(self) -> None:
        async for changes in self.class_source.batches():
            self.claiming.update_classes(changes)
            self._announce_claiming()

    @emits
    async def watch_claims_of_others(self) -> AsyncIterator[Sequence[ClaimingEvent]]:
        while True:
            await self.claiming_changed.wait()
            self.claiming_changed.clear()
            await self.clock.sleep(GATHER_CLAIMING_S)
            events = self.claiming.update()
            if events:
                yield events

    @emits
    async def watch_nodes(
        self,
    ) -> AsyncIterator[Sequence[NodeChanged | NodesListed | DevicesRegistered]]:
        """The first list is published whole: nodes may have been deleted while no watcher ran."""
        async for batch in self.node_source.batches():
            events: list[NodeChanged | NodesListed | DevicesRegistered] = []
            for update in batch:
                if update.facts:
                    events += self.nodes.update(update.facts, update.revision)
                    events += self.devices.update(update.name, update.devices)
                else:
                    events += self.nodes.remove(update.name, update.revision)
                    self.devices.remove(update.name)
            was_listed = self.nodes.revision is not None
            self.nodes.revision = self.node_source.revision
            if not was_listed:
                events += self.nodes.listed()
            self._forget_revisions(self.node_source.restored)
            if events:
                yield events

    @emits
    async def watch_node_usage(self) -> AsyncIterator[Sequence[NodeChanged]]:
        while True:
            await self.usage_changed.wait()
            self.usage_changed.clear()
            await self.clock.sleep(NODE_USAGE_S)
            changes = self.nodes.update_usage()
            if changes:
                yield changes

    @emits
    async def resync(self) -> AsyncIterator[Sequence[Resync]]:
        """Publish all but pending pods every `resync_s`; everything at the start and on request."""
        while True:
            requested = await self._wait_for_request()
            yield [
                *self.nodes.resync(),
                *self.devices.resync(now_s=self.clock.now()),
                *self._quotas_updated(),
                *(self.pods.resync(self._next_generation()) if requested else ()),
                *(self.claiming.resync() if requested else ()),
                *self.claims.resync(),
            ]
            async for chunk in self._list_with_retries():
                yield [chunk]

    async def _list_with_retries(self) -> AsyncIterator[PodsListed]:
        while True:
            request_ids = tuple(sorted(self.unanswered_requests))
            try:
                async for chunk in self.lister.chunks(request_ids, self.claiming.published):
                    yield chunk
            except LeaseholdError as error:
                logger.warning(
                    "pods could not be listed: %s; retrying in %g s", error, LIST_RETRY_S
                )
                await self.clock.sleep(LIST_RETRY_S)
            else:
                self.unanswered_requests.difference_update(request_ids)
                return

    async def _wait_for_request(self) -> bool:
        """Return whether there was a request in time."""
        requested = await wait_for_event(self.resync_requested, self.resync_s)
        if requested:
            self.resync_requested.clear()
        return requested

    @emits
    async def resync_stale(
        self,
    ) -> AsyncIterator[Sequence[PodEvent | ClaimAllocated | ClaimDeallocated]]:
        """Publish again what waits without a reason or an answer: its event may be lost.

        All other pending pods follow every two minutes.
        """
        for shard in itertools.count():
            await self.clock.sleep(UNEXPLAINED_S / 2)
            events: list[PodEvent | ClaimEvent] = []
            events += self.pods.resync_unexplained(self._next_generation())
            if events:
                logger.info("publishing %d pods again that wait without a reason", len(events))
            events += self.pods.ended_waits.take_due()
            events += self.claiming.ended_waits.take_due()
            events += self.claims.resync_unanswered()
            events += self.pods.resync_shard(self._next_generation(), shard)
            events += self.claiming.resync_shard(shard)
            self.claiming.note_untried()
            self._announce_claiming()
            if events:
                yield events

    @handles
    async def request_resync(self, events: Sequence[ResyncRequested | LedgerRebuilt]) -> None:
        for event in events:
            logger.info("resync: %s", event)
            if isinstance(event, ResyncRequested) and event.request_id:
                self.unanswered_requests.add(event.request_id)
        self.resync_requested.set()

    @handles
    async def requeue_failed(
        self, events: Sequence[BindingFailed]
    ) -> list[PodQueued | PodRejected | PodHandedOver]:
        pods = {event.pod for event in events}
        first = self.failed_bindings.add(pods, self.clock.ticks())
        await self.clock.sleep(FIRST_PAUSE_S)
        return self.pods.requeue(first, self._next_generation())

    @loops(every_s=FIRST_PAUSE_S)
    async def requeue_failing(self) -> list[PodQueued | PodRejected | PodHandedOver]:
        due = self.failed_bindings.due(self.clock.ticks())
        return self.pods.requeue(due, self._next_generation()) if due else []

    def _requeued(self) -> list[PodEvent]:
        events: list[PodEvent] = []
        if self.pods.changed_groups:
            events += self.pods.update_members(self._next_generation())
        if self.pods.selected.changed:
            events += self.pods.update_selected(self._next_generation())
        return events

    def _forget_revisions(self, restored: bool) -> None:
        """Publish everything if the API server may have gone back to an older state."""
        if restored:
            logger.warning("the API server may have been restored: publishing its present state")
            self.nodes.revisions_forgotten = True
            self.resync_requested.set()

    def _announce_usage(self) -> None:
        changed = self.pods.changed_nodes or self.pods.selected.changed_nodes
        if changed or self.pods.limits_have_changed:
            self.usage_changed.set()

    def _announce_storage(self) -> None:
        if self.pods.changed_claims is None or self.pods.changed_claims:
            self.storage_changed.set()

    def _announce_claiming(self) -> None:
        if self.claiming.changed:
            self.claiming_changed.set()

    def _quotas_updated(self) -> list[QuotasUpdated]:
        if self.quotas is None:
            return []
        return [QuotasUpdated(quotas=self.quotas, read_at=self.clock.now())]

    def _next_generation(self) -> int:
        self.generations += 1
        return int(self.clock.now() * 1000) + self.generations


def _report_left_out(room: Room | None) -> None:
    if room is None:
        return
    for text in room.take_unreported():
        logger.warning("%s", text)
    show_left_out(room)
