"""A queue of keys without duplicates: a key that is being handled is not handed out again."""

import asyncio
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class KeyQueue(Generic[K]):
    """Keys in the order in which they were added; one that is added again in between waits once."""

    def __init__(self, *, first_retry_s: float, max_retry_s: float) -> None:
        self.first_retry_s = first_retry_s
        self.max_retry_s = max_retry_s
        self._waiting: OrderedDict[K, None] = OrderedDict()
        self._in_progress: set[K] = set()
        self._again: set[K] = set()
        self._failures: dict[K, int] = {}
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._changed = asyncio.Event()

    def add(self, key: K) -> None:
        """Hand out the key as soon as it is not being handled."""
        if key in self._in_progress:
            self._again.add(key)
            return
        self._waiting[key] = None
        self._changed.set()

    def add_after(self, key: K, delay_s: float) -> None:
        """Add the key after a delay; of several delays the earliest counts."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        due = loop.time() + delay_s
        if timer is not None and not timer.cancelled() and loop.time() < timer.when() <= due:
            return
        if timer is not None:
            timer.cancel()
        self._timers[key] = loop.call_at(due, self.add, key)

    async def get(self) -> K:
        """Wait for a key, and return it; `done` or `retry` must follow."""
        while not self._waiting:
            self._changed.clear()
            await self._changed.wait()
        key, _ = self._waiting.popitem(last=False)
        self._in_progress.add(key)
        return key

    def done(self, key: K) -> None:
        """End the handling of a key."""
        self._failures.pop(key, None)
        self._finish(key)

    def retry(self, key: K) -> None:
        """End the handling of a key that failed, and add it again after a growing delay."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        self._finish(key)
        self.add_after(key, min(self.first_retry_s * 2 ** (failures - 1), self.max_retry_s))

    def close(self) -> None:
        """Cancel all delays."""
        for timer in self._timers.values():
            timer.cancel()

    def _finish(self, key: K) -> None:
        self._in_progress.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)
