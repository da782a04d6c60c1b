"""Clocks that a test moves, or that are faster than the machine's."""

import asyncio
import heapq
import itertools
import time


class FakeClock:
    """Sleepers wake when `advance` reaches their time."""

    def __init__(self, now: float = 1_787_000_000.0) -> None:
        self.time = now
        self.set_by = 0.0
        """What the wall clock was set forward by."""
        self.sleepers: list[tuple[float, int, asyncio.Event]] = []
        self.counter = itertools.count()

    def now(self) -> float:
        return self.time + self.set_by

    def ticks(self) -> float:
        return self.time

    async def sleep(self, duration_s: float) -> None:
        woken = asyncio.Event()
        heapq.heappush(self.sleepers, (self.time + duration_s, next(self.counter), woken))
        await woken.wait()

    def advance(self, duration_s: float) -> None:
        self.time += duration_s
        while self.sleepers and self.sleepers[0][0] <= self.time:
            heapq.heappop(self.sleepers)[2].set()


class FastClock:
    """Durations are `rate` times shorter than the machine's; the time of day is the same."""

    def __init__(self, rate: float = 1.0) -> None:
        self.rate = rate

    def now(self) -> float:
        return time.time()

    def ticks(self) -> float:
        return time.monotonic() * self.rate

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s / self.rate)
