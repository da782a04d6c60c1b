"""A mirror of the ledger that follows it, for the services that decide where pods fit."""

from collections.abc import AsyncIterator
from typing import Protocol

from shared.model.clock import Clock
from shared.model.ledger import LedgerChange, LedgerSnapshot
from shared.placing.mirror.cluster_mirror import ClusterMirror

DISCONNECTED_LIMIT_S = 10.0
"""A mirror that has been disconnected from the ledger for longer decides nothing."""


class FollowedLedger(Protocol):
    """The ledger, as a mirror follows it."""

    async def snapshot(self) -> LedgerSnapshot:
        """Return all nodes."""
        ...

    def changes(self, position: str) -> AsyncIterator[list[LedgerChange]]:
        """Yield changes after the position. Raises FeedTruncatedError if it is too old."""
        ...


class LedgerMirror:
    """A mirror, and for how long it has not followed the ledger."""

    def __init__(self, ledger: FollowedLedger, clock: Clock) -> None:
        self.ledger = ledger
        self.clock = clock
        self.mirror = ClusterMirror()
        self._disconnected_since: float | None = None

    def unready_reason(self) -> str | None:
        """Return why nothing can be decided by the mirror, or None."""
        if self.mirror.capacity < 0:
            return "no snapshot of the ledger yet"
        if self._disconnected_since is None:
            return None
        disconnected_s = self.clock.ticks() - self._disconnected_since
        if disconnected_s <= DISCONNECTED_LIMIT_S:
            return None
        return f"disconnected from the ledger for {disconnected_s:.0f} s"

    async def follow(self) -> None:
        """Apply a snapshot, then every change, until the connection is lost.

        Raises FeedTruncatedError if changes are missing: follow again.
        """
        try:
            snapshot = await self.ledger.snapshot()
            self.mirror.reset(snapshot.nodes)
            self.mirror.capacity = snapshot.capacity
            self._disconnected_since = None
            async for changes in self.ledger.changes(snapshot.position):
                self.mirror.apply(changes)
        finally:
            if self._disconnected_since is None:
                self._disconnected_since = self.clock.ticks()
