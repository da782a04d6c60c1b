"""How long the kubelet's calls may wait for what the agent cannot see.

The kubelet does nothing else meanwhile: calls that follow one another share one deadline.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shared.model.clock import Clock

PAUSE_S = 2.0
"""After this time without a call, the kubelet has begun another turn of its main loop."""


class Patience:
    def __init__(self, clock: Clock, sight_s: float) -> None:
        self._ticks = clock.ticks
        self._sight_s = sight_s
        self._calls = 0
        self._ended_at = float("-inf")
        self.until = 0.0
        """Deadline by the monotonic clock."""

    @property
    def is_serving(self) -> bool:
        return self._calls > 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        now = self._ticks()
        if not self._calls and now - self._ended_at > PAUSE_S:
            self.until = now + self._sight_s
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._ended_at = self._ticks()
