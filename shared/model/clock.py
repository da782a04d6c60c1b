"""Time as an argument: services ask a clock, tests give them one they can turn."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """What a service knows of time."""

    def now(self) -> float:
        """Return Unix seconds; may jump either way when the machine's clock is set."""
        ...

    def ticks(self) -> float:
        """Return seconds from some start of this process, that only go on: for durations."""
        ...

    async def sleep(self, duration_s: float) -> None:
        """Return after `duration_s` seconds."""
        ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        """Return Unix seconds."""
        return time.time()

    def ticks(self) -> float:
        """Return seconds that no setting of the clock changes."""
        return time.monotonic()

    async def sleep(self, duration_s: float) -> None:
        """Return after `duration_s` seconds."""
        await asyncio.sleep(duration_s)


def clock_ahead_s(theirs: float, before: float, after: float) -> float:
    """Return how far another clock is ahead at least, read between two times of our own clock."""
    return max(theirs - after, min(0.0, theirs - before))
