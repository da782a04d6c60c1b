"""Blocking calls in threads of their own: a call that never returns blocks nothing else.

Calls that start together share a thread, as waking one costs more than most calls.
"""

import asyncio
import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from queue import SimpleQueue
from typing import Generic, TypeVar

from shared.model.errors import LeaseholdError, UnavailableError

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

LIMIT_CHECK_S = 0.5
"""Interval of looks at the time limit of a call, which may change."""
PATIENCE_S = 0.05
"""How long calls wait for a busy thread before another one is started for them."""

_Calls = SimpleQueue[Callable[[], None]]
idle: list[_Calls] = []


class _Batch:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.waiting: deque[Callable[[], None]] = deque()
        self.returned: deque[Callable[[], None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def advance(self) -> None:
        _forming.pop(self.loop, None)
        if self._timer is not None:
            self._timer.cancel()
        while self.returned:
            self.returned.popleft()()
        if self.waiting:
            self._timer = self.loop.call_later(PATIENCE_S, self.advance)
            _call_in_thread(self._make_calls)

    def _make_calls(self) -> None:
        try:
            while call := self._take():
                call()
        finally:
            with contextlib.suppress(RuntimeError):  # the event loop has ended meanwhile
                self.loop.call_soon_threadsafe(self.advance)

    def _take(self) -> Callable[[], None] | None:
        try:
            return self.waiting.popleft()
        except IndexError:  # another thread took the last one
            return None


_forming: dict[asyncio.AbstractEventLoop, _Batch] = {}


def start_in_thread(function: Callable[[], T]) -> asyncio.Future[T | LeaseholdError]:
    """Call a function in a daemon thread, which does not keep the process alive.

    The future gets its value or LeaseholdError. Any other exception is a bug: its traceback is
    printed, and the future gets an UnavailableError.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T | LeaseholdError] = loop.create_future()
    if loop not in _forming:
        _forming[loop] = _Batch(loop)
        loop.call_soon(_forming[loop].advance)
    batch = _forming[loop]

    def run() -> None:
        outcome: T | LeaseholdError = UnavailableError(
            "the call failed unexpectedly; see the traceback in the log"
        )
        try:
            outcome = function()
        except LeaseholdError as error:
            outcome = error
        finally:
            batch.returned.append(functools.partial(_settle, result, outcome))

    batch.waiting.append(run)
    return result


def _settle(result: asyncio.Future[T], value: T) -> None:
    if not result.done():
        result.set_result(value)


def _call_in_thread(function: Callable[[], None]) -> None:
    try:
        calls = idle.pop()
    except IndexError:
        calls = SimpleQueue()
        threading.Thread(target=_work, args=(calls,), name="gpu", daemon=True).start()
    calls.put(function)


def _work(calls: _Calls) -> None:
    while True:
        calls.get()()
        idle.append(calls)


class SingleFlight(Generic[T]):
    """Calls of the driver, at most one in flight for each key.

    While a call exceeds its limit, later callers fail at once: a GPU that hangs must not delay each
    probe of the others.
    """

    def __init__(self) -> None:
        self._in_flight: dict[Hashable, asyncio.Future[T | LeaseholdError]] = {}
        self._overdue: set[Hashable] = set()

    async def call(
        self, key: Hashable, function: Callable[[], T], limit_s: Callable[[], float]
    ) -> T:
        """Return the function's value, or that of an earlier call that returns only now.

        Raises its error, or UnavailableError if it does not return within `limit_s()`, which is
        read again while waiting.
        """
        result = (await self.call_each({key: function}, limit_s))[key]
        if isinstance(result, LeaseholdError):
            raise result
        return result

    async def call_next(
        self, key: Hashable, function: Callable[[], T], limit_s: Callable[[], float]
    ) -> T:
        """Call after the earlier call of the key. Raises UnavailableError if that is overdue."""
        loop = asyncio.get_running_loop()
        until = loop.time() + limit_s()
        while (flight := self._in_flight.get(key)) is not None and not flight.done():
            left_s = until - loop.time()
            if left_s <= 0 or key in self._overdue:
                self._overdue.add(key)
                raise _no_response(limit_s())
            await asyncio.wait({flight}, timeout=left_s)
        self.start({key: function})
        return await self.call(key, function, limit_s)

    def start(self, functions: Mapping[K, Callable[[], T]]) -> None:
        for key, function in functions.items():
            flight = self._in_flight.get(key)
            if flight is None or flight.done():
                self._in_flight[key] = start_in_thread(function)
                self._overdue.discard(key)

    async def call_each(
        self, functions: Mapping[K, Callable[[], T]], limit_s: Callable[[], float]
    ) -> dict[K, T | LeaseholdError]:
        self.start({key: call for key, call in functions.items() if key not in self._in_flight})
        flights = {key: self._in_flight[key] for key in functions}
        loop = asyncio.get_running_loop()
        began = loop.time()
        for key, flight in flights.items():
            while not flight.done() and key not in self._overdue:
                left_s = began + limit_s() - loop.time()
                if left_s <= 0:
                    break
                await asyncio.wait({flight}, timeout=min(left_s, LIMIT_CHECK_S))
        return {key: self._result(key, flight, limit_s()) for key, flight in flights.items()}

    def _result(
        self, key: Hashable, flight: asyncio.Future[T | LeaseholdError], limit_s: float
    ) -> T | LeaseholdError:
        if not flight.done():
            self._overdue.add(key)
            return _no_response(limit_s)
        if self._in_flight.get(key) is flight:  # no other caller has started a new call meanwhile
            del self._in_flight[key]
            self._overdue.discard(key)
        return flight.result()


def _no_response(limit_s: float) -> UnavailableError:
    return UnavailableError(
        f"the NVIDIA driver did not respond within {limit_s:g} s: check `nvidia-smi`, and the "
        "kernel log for Xid messages"
    )
