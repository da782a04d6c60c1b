"""Time: the clock that services get as an argument, waits for events, and ends of tasks."""

import asyncio
import contextlib
import time
from collections.abc import Iterable
from typing import Any, Protocol

CANCEL_AGAIN_S = 1.0


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


def until_next(now_s: float, every_s: float) -> float:
    """Return the seconds until the next multiple of `every_s`; less than a hundredth is skipped.

    Loops that wait until then wake up together, and share what they read.
    """
    left_s = every_s - now_s % every_s
    return left_s if left_s > every_s / 100 else left_s + every_s


def until_tick(every_s: float) -> float:
    """Return the seconds until the next multiple of `every_s` by the event loop's time.

    That time stands still while callbacks run: the timers of all loops that wait for one multiple
    are due in the same millisecond, and wake up the process once.
    """
    return until_next(asyncio.get_running_loop().time(), every_s)


async def wait_for_event(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Return whether the event was set, after `timeout_s` seconds at most; None: no limit."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def end(task: "asyncio.Task[Any]", children: Iterable["asyncio.Task[Any]"] = ()) -> None:
    """Cancel a task until it has ended; raise its error, except CancelledError.

    `asyncio.wait_for` of Python 3.11 loses a cancellation that comes with the result, and a
    TaskGroup cancels its children only once: `children` are therefore cancelled again as well.
    """
    task.cancel()
    while not task.done():
        await asyncio.wait({task}, timeout=CANCEL_AGAIN_S)
        if not task.done():
            for one in (task, *children):
                one.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        task.result()
