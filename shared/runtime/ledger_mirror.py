"""A mirror of the ledger that follows it, for the services that decide where pods fit."""

import asyncio
from collections.abc import Callable

from shared.ledger.leases import RedisLeases
from shared.model.clock import Clock, wait_for_event
from shared.model.leases.ledger import FeedTruncatedError
from shared.placing.mirror.cluster_mirror import ClusterMirror

DISCONNECTED_LIMIT_S = 10.0
"""A mirror that has been disconnected from the ledger for longer decides nothing."""
READ_PAUSE_S = 0.05
"""Where pauses are allowed, changes within this time of each other are read together."""
REACH_S = 0.05
"""How long a caller waits for changes that it knows of."""


class LedgerMirror:
    def __init__(
        self,
        ledger: RedisLeases,
        clock: Clock,
        *,
        may_pause: Callable[[], bool] = lambda: False,
    ) -> None:
        """With `may_pause`, changes are read up to `READ_PAUSE_S` later, for less CPU."""
        self.ledger = ledger
        self.clock = clock
        self.may_pause = may_pause
        self.mirror = ClusterMirror()
        self._disconnected_since: float | None = None
        self._snapshot_at: float | None = None
        self._failing_since: float | None = None
        """Unless it has followed for long since."""
        self._fault = ""
        self._requested = asyncio.Event()
        self._applied = asyncio.Event()

    def unready_reason(self) -> str | None:
        if self.mirror.capacity < 0:
            return f"no snapshot of the ledger yet{self._fault}"
        since = self._failing_since if self._is_failing() else self._disconnected_since
        if since is None:
            return None
        disconnected_s = self.clock.ticks() - since
        if disconnected_s <= DISCONNECTED_LIMIT_S:
            return None
        return f"disconnected from the ledger for {disconnected_s:.0f} s{self._fault}"

    def _is_failing(self) -> bool:
        """Return whether following has not lasted since it failed: a snapshot is no proof."""
        if self._failing_since is None or self._snapshot_at is None:
            return False
        return self.clock.ticks() < self._snapshot_at + DISCONNECTED_LIMIT_S

    async def follow(self) -> None:
        """Raises FeedTruncatedError if changes are missing: follow again."""
        try:
            snapshot = await self.ledger.snapshot()
            self.mirror.reset(snapshot.nodes)
            self.mirror.capacity = snapshot.capacity
            self.mirror.version = snapshot.version
            self._disconnected_since = None
            self._snapshot_at = self.clock.ticks()
            async for changes in self.ledger.changes(snapshot.position):
                self.mirror.apply(changes)
                self._failing_since = None
                self._applied.set()
                if self.may_pause():
                    await wait_for_event(self._requested, READ_PAUSE_S)
                self._requested.clear()
        except FeedTruncatedError:
            raise
        except Exception as error:
            self._fault = f": {str(error) or type(error).__name__}"
            if self._snapshot_at is not None and not self._is_failing():
                self._failing_since = self.clock.ticks()
            raise
        finally:
            if self._disconnected_since is None:
                self._disconnected_since = self.clock.ticks()

    def read_now(self) -> None:
        self._requested.set()

    async def reach(self, capacity: int) -> None:
        """Return after `REACH_S` at most."""
        while self.mirror.capacity < capacity:
            self._applied.clear()
            self.read_now()
            if not await wait_for_event(self._applied, REACH_S):
                return
