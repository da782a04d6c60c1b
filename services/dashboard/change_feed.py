"""What changed, in numbered rounds, for any number of readers who are each somewhere else."""

import asyncio
from collections import deque
from collections.abc import Iterable
from uuid import uuid4

from services.dashboard.projection import Key

ROUNDS_KEPT = 2_000


class Hub:
    """The rounds of the last minutes. A reader that is further behind starts anew."""

    def __init__(self) -> None:
        self.life = uuid4().hex[:12]
        self.version = 0
        self._rounds: deque[tuple[int, frozenset[Key]]] = deque(maxlen=ROUNDS_KEPT)
        self._news = asyncio.Event()

    @property
    def place(self) -> str:
        """Where a reader is who has seen everything."""
        return f"{self.life}-{self.version}"

    def publish(self, keys: Iterable[Key]) -> None:
        """Say that these look different now."""
        changed = frozenset(keys)
        if not changed:
            return
        self.version += 1
        self._rounds.append((self.version, changed))
        self._news.set()
        self._news = asyncio.Event()

    def since(self, place: str) -> frozenset[Key] | None:
        """Return what looks different than at a place; None: nobody remembers."""
        life, _, number = place.rpartition("-")
        if life != self.life or not number.isdecimal() or int(number) > self.version:
            return None
        after = int(number)
        if after < self.version and (not self._rounds or self._rounds[0][0] > after + 1):
            return None
        return frozenset(key for version, keys in self._rounds if version > after for key in keys)

    async def later_than(self, place: str, *, limit_s: float) -> bool:
        """Wait until there is something after a place; False if nothing came in time."""
        news = self._news
        if place != self.place:
            return True
        try:
            async with asyncio.timeout(limit_s):
                await news.wait()
        except TimeoutError:
            return False
        return True
