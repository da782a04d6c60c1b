"""Time: the clock that services get, waits, tasks in the background, and what expires."""

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

K = TypeVar("K")
V = TypeVar("V")
CANCEL_AGAIN_S = 1.0
"""A task that has not ended is cancelled again after this time: libraries swallow cancellations."""


class Clock(Protocol):
    def now(self) -> float:
        """Return Unix seconds, which jump when the machine's clock is set."""
        ...

    def ticks(self) -> float: ...

    async def sleep(self, duration_s: float) -> None: ...


class SystemClock:
    def now(self) -> float:
        return time.time()

    def ticks(self) -> float:
        return time.monotonic()

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)


def clock_ahead_s(theirs: float, before: float, after: float) -> float:
    """Return the minimum by which a remote clock is ahead, read between two local times."""
    return max(theirs - after, min(0.0, theirs - before))


def until_next(now_s: float, every_s: float) -> float:
    """Return the seconds until the next multiple of `every_s`; less than a hundredth is skipped.

    Loops that wait until then wake up together.
    """
    left_s = every_s - now_s % every_s
    return left_s if left_s > every_s / 100 else left_s + every_s


def until_tick(every_s: float) -> float:
    """Return the seconds until the next multiple of `every_s` by the event loop's time.

    That time stands still while callbacks run, so that all loops of one multiple wake up the
    process once.
    """
    return until_next(asyncio.get_running_loop().time(), every_s)


async def wait_for_event(event: asyncio.Event, timeout_s: float | None) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def end(task: "asyncio.Task[Any]", children: Iterable["asyncio.Task[Any]"] = ()) -> None:
    """Cancel a task until it has ended; raise its error, except CancelledError.

    `asyncio.wait_for` of Python 3.11 loses a cancellation that comes with the result, and a
    TaskGroup cancels its `children` only once.
    """
    task.cancel()
    while not task.done():
        await asyncio.wait({task}, timeout=CANCEL_AGAIN_S)
        if not task.done():
            for running in (task, *children):
                running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        task.result()


@contextlib.asynccontextmanager
async def in_background(work: Coroutine[Any, Any, None]) -> AsyncIterator["asyncio.Task[None]"]:
    try:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(work)
            try:
                yield task
            finally:
                with contextlib.suppress(Exception):  # the group raises it
                    await end(task)
    except BaseExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        raise group.exceptions[0] from None


class ExpiringMap(Generic[K, V]):
    """A bounded mapping for keys that others choose; an entry expires after it was last set."""

    def __init__(self, ticks: Callable[[], float], *, expires_s: float, most: int) -> None:
        self._ticks = ticks
        self._expires_s = expires_s
        self._most = most
        self._entries: OrderedDict[K, tuple[float, V]] = OrderedDict()

    def set(self, key: K, value: V) -> None:
        self._forget_expired()
        self._entries[key] = (self._ticks(), value)
        self._entries.move_to_end(key)
        if len(self._entries) > self._most:
            self._entries.popitem(last=False)

    def get(self, key: K) -> V | None:
        self._forget_expired()
        entry = self._entries.get(key)
        return None if entry is None else entry[1]

    def pop(self, key: K) -> V | None:
        self._forget_expired()
        entry = self._entries.pop(key, None)
        return None if entry is None else entry[1]

    def values(self) -> Iterator[V]:
        self._forget_expired()
        for _, value in list(self._entries.values()):
            yield value

    def __contains__(self, key: K) -> bool:
        self._forget_expired()
        return key in self._entries

    def __len__(self) -> int:
        self._forget_expired()
        return len(self._entries)

    def _forget_expired(self) -> None:
        until = self._ticks() - self._expires_s
        while self._entries:
            key = next(iter(self._entries))
            if self._entries[key][0] > until:
                return
            del self._entries[key]


class Rate:
    """The most that strangers may do in a second; three quarters of it for one of them."""

    def __init__(self, ticks: Callable[[], float], *, most: int) -> None:
        self._ticks = ticks
        self._most = most
        self._second = -1.0
        self._counts: Counter[str] = Counter()

    def allows(self, sender: str) -> bool:
        second = self._ticks() // 1
        if second != self._second:
            self._second = second
            self._counts.clear()
        if self._counts.total() >= self._most or self._counts[sender] * 4 >= self._most * 3:
            return False
        self._counts[sender] += 1
        return True
