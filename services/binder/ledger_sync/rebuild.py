"""Rebuilds an empty ledger: one binder collects what agents and pods report, and restores it.

It reads the evidence in its own memory: the listing when it is complete, then reports as they
arrive. A binder that takes the rebuild over begins again. Nothing is placed meanwhile: the ledger
refuses reservations until the rebuild is finished.
"""

import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

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
from shared.model.events.pod_events import BoundPod, LedgerRebuilt, ResyncRequested
from shared.model.leases.lease import Lease
from shared.runtime.service import Publish, loops

logger = logging.getLogger(__name__)
RebuildEvent = LedgerRebuilt | ResyncRequested


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
    """Until a listing is requested again that is not there; twice as long each time, since a
    listing of many pods takes its time."""
    compare_again_s: float = 10.0
    """Until pods are compared once more. A pod whose deletion was among the lost writes can be
    recorded as waiting after the rebuild, by an event that was sent before the deletion; all such
    events have been handled by then."""


@dataclass(eq=False, kw_only=True)
class LedgerRebuild:
    """One rebuild at a time, by one replica."""

    ledger: RedisLeases
    evidence: CollectedEvidence
    publish: Publish
    holders: LeaseHolders
    clock: Clock
    bindings_in_flight: Callable[[], int]
    timing: RebuildTiming = RebuildTiming()

    def __post_init__(self) -> None:
        self._compare_again_at = math.inf

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
        self.evidence.begin_rebuild()
        try:
            return await self._restore(token)
        finally:
            self.evidence.end_rebuild()

    async def _restore(self, token: str) -> list[RebuildEvent]:
        await self._await_bindings(token)
        recovery = Recovery(await self._list_pods(token))
        restored = 0
        misfits = []
        async for evidence in self._leases(recovery, token):
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
        problems = [*recovery.problems, *misfits]
        if problems:
            count_anomaly("not_restored", len(problems))
            logger.error("%d leases are not restored: %s", len(problems), summarize(problems))
        if not await self.ledger.finish_rebuild(token):
            return []
        logger.warning("the ledger has %d leases again", restored)
        self._compare_again_at = self.clock.ticks() + self.timing.compare_again_s
        return [LedgerRebuilt(generation=token)]

    def _compare_again(self) -> list[RebuildEvent]:
        if self.clock.ticks() < self._compare_again_at:
            return []
        self._compare_again_at = math.inf
        return [ResyncRequested(reason="events from before the rebuild have been handled")]

    async def _bound_since(self, recovery: Recovery, token: str) -> list[Evidence]:
        """Return the leases of pods that agents report, and that were bound after the listing.

        A pod that cannot be read is compared again with the next listing.
        """
        bound: list[Evidence] = []
        unlisted = list(recovery.unlisted.values())
        for first in range(0, len(unlisted), MAX_READS):
            await self._extend_lock(token)
            some = unlisted[first : first + MAX_READS]
            for lease, pod in zip(some, await self.holders.read(some), strict=True):
                match evidence_now(lease, pod):
                    case Evidence() as evidence:
                        bound.append(evidence)
                    case str(reason) if reason:
                        recovery.problems.append(reason)
        return bound

    async def _list_pods(self, token: str) -> list[BoundPod]:
        """Request a resync, again until a listing is there; return its pods and claims."""
        pause_s = 0.0
        requested_at = self.clock.ticks()
        while True:
            has_quotas = await self._extend_lock(token)
            pages = self.evidence.answer_to(token)
            if pages is not None and has_quotas:
                return [holder for page in pages for holder in holders_in(page)]
            if self.clock.ticks() - requested_at >= pause_s:
                reason = "the ledger is being rebuilt"
                await self.publish([ResyncRequested(reason=reason, request_id=token)])
                pause_s, requested_at = (
                    2 * pause_s or self.timing.resync_every_s,
                    self.clock.ticks(),
                )
            await self.clock.sleep(self.timing.poll_s)

    async def _leases(self, recovery: Recovery, token: str) -> AsyncIterator[Sequence[Evidence]]:
        """Yield the leases to restore: first those of agents' reports, which count most."""
        since = self.clock.ticks()
        awaited = len(recovery.silent)
        silent_before = awaited
        while True:
            await self._extend_lock(token)
            reports = list(self.evidence.take_reports().items())
            for first in range(0, len(reports), NODES_PER_PAGE):
                yield recovery.add_reports(dict(reports[first : first + NODES_PER_PAGE]))
                await self._extend_lock(token)
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
        yield await self._bound_since(recovery, token)

    async def _await_bindings(self, token: str) -> None:
        """Wait for the Bindings in flight: the listing must include their pods."""
        deadline = self.clock.ticks() + self.timing.own_bindings_s
        await self.clock.sleep(self.timing.settle_s)
        while self.bindings_in_flight() and self.clock.ticks() < deadline:
            await self._extend_lock(token)
            await self.clock.sleep(self.timing.poll_s)

    async def _extend_lock(self, token: str) -> bool:
        """Return whether all quotas are known."""
        now = self.clock.now()
        return await self.ledger.extend_rebuild(token, now=now, lock_s=self.timing.lock_s)


def _misfit(lease: Lease, reason: str) -> str:
    pod = f"{lease.namespace}/{lease.name} ({lease.pod})"
    return f"the lease of pod {pod} does not fit on {lease.node}: {reason}"
