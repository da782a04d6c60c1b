"""The keys that have changed, in numbered rounds, for readers at different positions."""

import asyncio
from collections import deque
from collections.abc import Iterable
from uuid import uuid4

from services.dashboard.projection import ChangeKey
from shared.model.clock import wait_for_event
from shared.model.quantity import parse_decimal

MAX_CHANGES = 2_000


class ChangeFeed:
    """The latest rounds of changes. A reader that is further behind must start again."""

    def __init__(self) -> None:
        self.id = uuid4().hex[:12]
        self.version = 0
        self._rounds: deque[tuple[int, frozenset[ChangeKey]]] = deque(maxlen=MAX_CHANGES)
        self._changed = asyncio.Event()

    @property
    def position(self) -> str:
        """The position after all changes."""
        return f"{self.id}-{self.version}"

    def publish(self, keys: Iterable[ChangeKey]) -> None:
        """Add a round of changed keys."""
        changed_keys = frozenset(keys)
        if not changed_keys:
            return
        self.version += 1
        self._rounds.append((self.version, changed_keys))
        self._changed.set()
        self._changed = asyncio.Event()

    def since(self, position: str) -> frozenset[ChangeKey] | None:
        """Return the keys that changed after a position; None if the position is not known."""
        feed_id, _, number = position.rpartition("-")
        after = parse_decimal(number)
        if feed_id != self.id or after is None or after > self.version:
            return None
        if after < self.version and (not self._rounds or self._rounds[0][0] > after + 1):
            return None
        return frozenset(key for version, keys in self._rounds if version > after for key in keys)

    async def wait_after(self, position: str, *, limit_s: float) -> bool:
        """Wait for a change after a position; return False after `limit_s` without one."""
        changed = self._changed
        if position != self.position:
            return True
        return await wait_for_event(changed, limit_s)
