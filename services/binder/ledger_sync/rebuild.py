"""Rebuilding an emptied ledger: one binder collects what agents and pods say, and restores it.

The evidence arrives as ordinary events, at whichever replica; so it is staged in the ledger's own
store until the one that won the rebuild finds it complete. Nothing is placed meanwhile: the ledger
refuses reservations until the rebuild is finished.
"""

import logging
from collections.abc import Sequence
from typing import Protocol

from services.binder.ledger_sync.recovery import Evidence, recover, silent_nodes
from services.binder.ports.ledger import LeaseResizeStore
from services.binder.ports.metrics import Tally
from services.binder.report.explanations import summarize
from shared.model.clock import Clock
from shared.model.errors import ConflictError
from shared.model.events.event import Event
from shared.model.events.node_events import Allocation, DeviceReported
from shared.model.events.pod_events import BoundPod, LedgerRebuilt, ResyncRequested
from shared.model.lease import Lease
from shared.model.names import NodeName

logger = logging.getLogger(__name__)

SETTLE_S = 1.0
"""Other replicas' Bindings that were under way when the ledger was lost land within this."""
LAND_S = 10.0
"""Our own are waited for, but not longer than this."""
PATIENCE_S = 10.0
"""A node that does not report its devices within this is restored from its pods alone."""
LOOK_S = 0.2
LOCK_S = 6.0
"""A replica that dies while it rebuilds is replaced after this."""
ASK_AGAIN_S = 5.0


class Restoring(Protocol):
    """The ledger's side of a rebuild."""

    async def generation(self) -> str | None:
        """Return the name of the ledger's present life; None while it is to be rebuilt."""
        ...

    async def begin_rebuild(self, *, now: float, lock_s: float = ...) -> str | None:
        """Take the rebuild on; None if there is nothing to do or another replica has it."""
        ...

    async def restore(
        self, leases: Sequence[Lease], *, now: float, token: str = ..., lock_s: float = ...
    ) -> list[tuple[Lease, str]]:
        """Book leases again, in this order; return those that do not fit, and why.

        Raises ConflictError if another replica took the rebuild over.
        """
        ...

    @property
    def resizes(self) -> LeaseResizeStore:
        """Leases that change their size."""
        ...

    async def finish_rebuild(self, token: str) -> bool:
        """Open the ledger; False if another replica took the rebuild over."""
        ...


class Evidences(Protocol):
    """What several binders collect together."""

    async def save_reports(self, reports: Sequence[DeviceReported]) -> None:
        """Keep what these nodes' agents have activated."""
        ...

    async def reports(self) -> dict[NodeName, tuple[Allocation, ...]]:
        """Return what was kept, by node."""
        ...

    async def complete_listing(self, *, since: float) -> tuple[BoundPod, ...] | None:
        """Return the newest complete listing begun at or after `since`, if there is one."""
        ...

    async def extend_rebuild(self, token: str, *, now: float, lock_s: float) -> bool:
        """Keep the rebuild ours for `lock_s` more seconds; False if it is not any more."""
        ...

    async def clear(self) -> None:
        """Forget reports and listings."""
        ...


class Asking(Protocol):
    """The bus, to ask everybody for everything."""

    async def publish(self, events: Sequence[Event]) -> None:
        """Publish events; raises UnavailableError if that could not be confirmed."""
        ...


class Flights(Protocol):
    """Bindings on their way to the API server: a listing does not show them yet."""

    @property
    def under_way(self) -> int:
        """How many have had no answer."""
        ...


class LedgerRebuild:
    """One rebuild at a time, by one replica; others stage what they hear."""

    def __init__(
        self,
        ledger: Restoring,
        staging: Evidences,
        bus: Asking,
        clock: Clock,
        tally: Tally,
        *,
        flights: Flights,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.ledger = ledger
        self.staging = staging
        self.bus = bus
        self.flights = flights
        self.clock = clock
        self.tally = tally
        self.patience_s = patience_s
        self._untold: LedgerRebuilt | None = None

    async def stage_reports(self, reports: Sequence[DeviceReported]) -> None:
        """Keep reports while the ledger is being rebuilt."""
        if await self.ledger.generation() is None:
            await self.staging.save_reports(reports)

    async def step(self) -> LedgerRebuilt | None:
        """LedgerRebuild the ledger if it needs it and nobody else does.

        Returns what has to be told, again and again until `told` is called.
        """
        if self._untold is None:
            self._untold = await self._rebuild()
        return self._untold

    def lease_changes(self) -> None:
        """Record that everybody has been told of the rebuild."""
        self._untold = None

    async def _rebuild(self) -> LedgerRebuilt | None:
        if await self.ledger.generation() is not None:
            return None
        token = await self.ledger.begin_rebuild(now=self.clock.now(), lock_s=LOCK_S)
        if token is None:
            return None
        logger.warning("the ledger is empty or has lost writes: placing waits until it is rebuilt")
        recovery = recover(await self._collect(token))
        misfits = await self.ledger.restore(
            recovery.leases, now=self.clock.now(), token=token, lock_s=LOCK_S
        )
        if recovery.lagging:
            await self.ledger.resizes.set_unsynced(recovery.lagging)
        problems = [*recovery.problems, *(_misfit(lease, why) for lease, why in misfits)]
        if problems:
            self.tally.count("not_restored", len(problems))
            logger.error("%d leases are not restored: %s", len(problems), summarize(problems))
        if not await self.ledger.finish_rebuild(token):
            return None
        await self.staging.clear()
        restored = len(recovery.leases) - len(misfits)
        logger.warning("the ledger holds %d leases again", restored)
        return LedgerRebuilt(generation=token)

    async def _collect(self, token: str) -> Evidence:
        """Ask for everything and wait for it; a silent node is waited for only so long."""
        await self.staging.clear()
        await self._let_land(token)
        since, began = self.clock.now(), self.clock.ticks()
        asked: float | None = None
        while True:
            now = self.clock.ticks()
            await self._hold(token)
            if asked is None or now - asked >= ASK_AGAIN_S:
                await self.bus.publish([ResyncRequested(reason="the ledger is being rebuilt")])
                asked = now
            pods = await self.staging.complete_listing(since=since)
            if pods is not None:
                allocations = await self.staging.reports()
                evidence = Evidence(pods=pods, allocations=allocations)
                silent = silent_nodes(evidence)
                if not silent:
                    return evidence
                if now - began >= self.patience_s:
                    logger.error(
                        "%d nodes are silent; their leases come from their pods: %s",
                        len(silent),
                        summarize(sorted(silent)),
                    )
                    return evidence
            await self.clock.sleep(LOOK_S)

    async def _let_land(self, token: str) -> None:
        """Deferral for the Bindings under way: what they bind has to be listed."""
        until = self.clock.ticks() + LAND_S
        await self.clock.sleep(SETTLE_S)
        while self.flights.under_way and self.clock.ticks() < until:
            await self._hold(token)
            await self.clock.sleep(LOOK_S)

    async def _hold(self, token: str) -> None:
        if not await self.staging.extend_rebuild(token, now=self.clock.now(), lock_s=LOCK_S):
            raise ConflictError("another replica has taken the rebuild over")


def _misfit(lease: Lease, why: str) -> str:
    return (
        f"the lease of pod {lease.namespace}/{lease.name} ({lease.pod}) clashes on {lease.node}: "
        f"{why}"
    )
