"""Rebuilds an empty ledger, or single records: from what agents and pods report.

A binder that takes the rebuild over begins again. Meanwhile the ledger refuses reservations.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from uuid import uuid4

from services.binder.ledger_sync.evidence import CollectedEvidence
from services.binder.ledger_sync.lease_holders import MAX_READS, LeaseHolders, holders_in
from services.binder.ledger_sync.recovery import (
    NODES_PER_PAGE,
    Evidence,
    Recovery,
    evidence_now,
)
from services.binder.metrics import count_anomaly
from services.binder.report.explanations import summarize
from shared.ledger.leases import RedisLeases
from shared.model.clock import Clock
from shared.model.errors import ConflictError
from shared.model.events.node_events import Allocation
from shared.model.events.pod_events import BoundPod, LedgerRebuilt, ResyncRequested
from shared.model.leases.lease import Lease
from shared.model.leases.ledger import UnreadableRecord
from shared.model.names import NodeName, PodUid
from shared.runtime.service import Publish, loops

logger = logging.getLogger(__name__)
RebuildEvent = LedgerRebuilt | ResyncRequested
KeepOn = Callable[[], Awaitable[bool]]
"""Raises an error once the work is in vain; returns whether all quotas are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildTiming:
    settle_s: float = 1.0
    """Other replicas' Bindings that were in flight when the ledger was lost finish within this."""
    own_bindings_s: float = 10.0
    """The longest wait for our own Bindings in flight."""
    silent_node_s: float = 10.0
    """Nodes that have not reported by then are restored from their pods alone, unless a
    `progress_share` of all those awaited has reported in that time: then as long again."""
    progress_share: float = 0.05
    poll_s: float = 0.2
    """Interval of looks at what a rebuild waits for."""
    lock_s: float = 6.0
    """A replica that dies while it rebuilds is replaced after this."""
    resync_every_s: float = 5.0
    """Until a missing listing is requested again; twice as long each time, since a listing of many
    pods takes its time."""
    compare_again_s: float = 10.0
    """Until pods are compared once more: an event from before a lost deletion may record a pod as
    waiting after the rebuild. All such events have been handled by then."""


@dataclass(eq=False, kw_only=True)
class LedgerRebuild:
    ledger: RedisLeases
    evidence: CollectedEvidence
    publish: Publish
    holders: LeaseHolders
    clock: Clock
    bindings_in_flight: Callable[[], int]
    timing: RebuildTiming = RebuildTiming()

    def __post_init__(self) -> None:
        self._compare_again_at = math.inf
        self._collecting = asyncio.Lock()
        """Evidence is collected for one purpose at a time."""

    @loops(every_s=1.0)
    async def rebuild_ledger(self) -> list[RebuildEvent]:
        return await self._rebuild() or self._compare_again()

    async def _rebuild(self) -> list[RebuildEvent]:
        if await self.ledger.status(now=self.clock.ticks()) is not None:
            return []
        token = await self.ledger.begin_rebuild(now=self.clock.now(), lock_s=self.timing.lock_s)
        if token is None:
            return []
        logger.warning("the ledger is empty or has lost writes: no pod is placed until its rebuild")
        async with self._collecting:
            self.evidence.begin_rebuild()
            try:
                return await self._restore(token)
            finally:
                self.evidence.end_rebuild()

    async def renew(
        self, generation: str, damaged: Sequence[UnreadableRecord]
    ) -> list[ResyncRequested]:
        """Write damaged records anew: leases as a rebuild restores them, all others as reported.

        Raises ConflictError if the ledger was rebuilt since `generation`.
        """
        pods = {PodUid(record.key) for record in damaged if record.kind == "leases"}
        async with self._collecting:
            recovery, evidence = await self._evidence_of(pods, generation)
        refused = await self.ledger.renew(
            damaged,
            [lost.lease for lost in evidence],
            generation=generation,
            now=self.clock.now(),
            hearsay={lost.lease.pod for lost in evidence if lost.is_hearsay},
        )
        if recovery.lagging:
            await self.ledger.resizes.set_unsynced(recovery.lagging)
        _report_problems([*recovery.problems, *(_misfit(lease, why) for lease, why in refused)])
        return [ResyncRequested(reason=f"{len(damaged)} damaged records of the ledger are renewed")]

    async def _evidence_of(
        self, pods: Collection[PodUid], generation: str
    ) -> tuple[Recovery, list[Evidence]]:
        if not pods:
            return Recovery(()), []
        keep_on = partial(self._check_same, generation)
        self.evidence.begin_rebuild()
        try:
            await self._await_bindings(keep_on)
            listed = await self._list_pods(uuid4().hex, keep_on)
            recovery = Recovery(pod for pod in listed if pod.pod in pods)
            pages = [page async for page in self._leases(recovery, keep_on, pods)]
        finally:
            self.evidence.end_rebuild()
        return recovery, [lost for page in pages for lost in page]

    async def _check_same(self, generation: str) -> bool:
        if await self.ledger.generation() != generation:
            raise ConflictError("the ledger was rebuilt while damaged records were collected")
        return True

    async def _restore(self, token: str) -> list[RebuildEvent]:
        keep_on = partial(self._extend_lock, token)
        await self._await_bindings(keep_on)
        recovery = Recovery(await self._list_pods(token, keep_on))
        restored = 0
        misfits = []
        async for evidence in self._leases(recovery, keep_on):
            refused = await self.ledger.restore(
                [lost.lease for lost in evidence],
                now=self.clock.now(),
                token=token,
                lock_s=self.timing.lock_s,
                hearsay={lost.lease.pod for lost in evidence if lost.is_hearsay},
            )
            restored += len(evidence) - len(refused)
            misfits += [_misfit(lease, reason) for lease, reason in refused]
        if recovery.lagging:
            await self.ledger.resizes.set_unsynced(recovery.lagging)
        _report_problems([*recovery.problems, *misfits])
        if not await self.ledger.finish_rebuild(token):
            return []
        logger.warning("the ledger has %d leases again", restored)
        if restored:  # none, where Redis is new
            count_anomaly("ledger_rebuilt")
        self._compare_again_at = self.clock.ticks() + self.timing.compare_again_s
        return [LedgerRebuilt(generation=token)]

    def _compare_again(self) -> list[RebuildEvent]:
        if self.clock.ticks() < self._compare_again_at:
            return []
        self._compare_again_at = math.inf
        return [ResyncRequested(reason="events from before the rebuild have been handled")]

    async def _bound_since(self, recovery: Recovery, keep_on: KeepOn) -> list[Evidence]:
        """Return reported leases of pods that were bound after the listing."""
        bound: list[Evidence] = []
        unlisted = list(recovery.unlisted.values())
        for first in range(0, len(unlisted), MAX_READS):
            await keep_on()
            some = unlisted[first : first + MAX_READS]
            for lease, pod in zip(some, await self.holders.read(some), strict=True):
                match evidence_now(lease, pod):
                    case Evidence() as evidence:
                        bound.append(evidence)
                    case str(reason) if reason:
                        recovery.problems.append(reason)
        return bound

    async def _list_pods(self, request_id: str, keep_on: KeepOn) -> list[BoundPod]:
        pause_s = 0.0
        requested_at = self.clock.ticks()
        while True:
            has_quotas = await keep_on()
            pages = self.evidence.answer_to(request_id)
            if pages is not None and has_quotas:
                return [holder for page in pages for holder in holders_in(page)]
            if self.clock.ticks() - requested_at >= pause_s:
                reason = "leases of the ledger are being restored"
                await self.publish([ResyncRequested(reason=reason, request_id=request_id)])
                pause_s, requested_at = (
                    2 * pause_s or self.timing.resync_every_s,
                    self.clock.ticks(),
                )
            await self.clock.sleep(self.timing.poll_s)

    async def _leases(
        self, recovery: Recovery, keep_on: KeepOn, pods: Collection[PodUid] | None = None
    ) -> AsyncIterator[Sequence[Evidence]]:
        """Yield the leases to restore, first those that agents report."""
        since = self.clock.ticks()
        awaited = len(recovery.silent)
        silent_before = awaited
        while True:
            await keep_on()
            reports = _of_pods(self.evidence.take_reports(), pods)
            for first in range(0, len(reports), NODES_PER_PAGE):
                yield recovery.add_reports(dict(reports[first : first + NODES_PER_PAGE]))
                await keep_on()
            if reports:
                continue
            if not recovery.silent:
                break
            if self.clock.ticks() - since >= self.timing.silent_node_s:
                progress = silent_before - len(recovery.silent)
                if progress < self.timing.progress_share * awaited:
                    break
                since = self.clock.ticks()
                silent_before = len(recovery.silent)
            await self.clock.sleep(self.timing.poll_s)
        if recovery.silent:
            logger.error(
                "%d nodes are silent; their leases come from their pods: %s",
                len(recovery.silent),
                summarize(sorted(recovery.silent)),
            )
        for leases in recovery.annotated():
            yield [Evidence(lease, is_hearsay=False) for lease in leases]
        yield await self._bound_since(recovery, keep_on)

    async def _await_bindings(self, keep_on: KeepOn) -> None:
        """Wait for Bindings in flight: the listing must include their pods."""
        deadline = self.clock.ticks() + self.timing.own_bindings_s
        await self.clock.sleep(self.timing.settle_s)
        while self.bindings_in_flight() and self.clock.ticks() < deadline:
            await keep_on()
            await self.clock.sleep(self.timing.poll_s)

    async def _extend_lock(self, token: str) -> bool:
        """Return whether all quotas are read."""
        now = self.clock.now()
        return await self.ledger.extend_rebuild(token, now=now, lock_s=self.timing.lock_s)


def _of_pods(
    reports: Mapping[NodeName, tuple[Allocation, ...]], pods: Collection[PodUid] | None
) -> list[tuple[NodeName, tuple[Allocation, ...]]]:
    if pods is None:
        return list(reports.items())
    return [
        (node, tuple(allocation for allocation in allocations if allocation.pod in pods))
        for node, allocations in reports.items()
    ]


def _report_problems(problems: Sequence[str]) -> None:
    if problems:
        count_anomaly("not_restored", len(problems))
        logger.error("%d leases are not restored: %s", len(problems), summarize(problems))


def _misfit(lease: Lease, reason: str) -> str:
    pod = f"{lease.namespace}/{lease.name} ({lease.pod})"
    return f"the lease of pod {pod} does not fit on {lease.node}: {reason}"
