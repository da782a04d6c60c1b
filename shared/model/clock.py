"""The clock interface: services get a clock as an argument, and tests pass a fake one."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Time as services use it."""

    def now(self) -> float:
        """Return Unix seconds; may jump either way when the machine's clock is set."""
        ...

    def ticks(self) -> float:
        """Return monotonic seconds, for durations."""
        ...

    async def sleep(self, duration_s: float) -> None:
        """Return after `duration_s` seconds."""
        ...


class SystemClock:
    """The clock of the machine."""

    def now(self) -> float:
        """Return Unix seconds."""
        return time.time()

    def ticks(self) -> float:
        """Return monotonic seconds."""
        return time.monotonic()

    async def sleep(self, duration_s: float) -> None:
        """Return after `duration_s` seconds."""
        await asyncio.sleep(duration_s)


def clock_ahead_s(theirs: float, before: float, after: float) -> float:
    """Return the minimum by which a remote clock is ahead, read between two local times."""
    return max(theirs - after, min(0.0, theirs - before))
