"""Blocking calls in threads of their own: a call that never returns blocks nothing else."""

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Hashable
from queue import SimpleQueue
from typing import Generic, TypeVar

from shared.model.errors import UnavailableError

T = TypeVar("T")

LIMIT_CHECK_S = 0.5
"""How often the time limit of a call is read again."""

_Calls = SimpleQueue[Callable[[], None]]
idle: list[_Calls] = []
"""Threads that wait for their next call: to start one costs more than most calls."""


def start_in_thread(function: Callable[[], T], *errors: type[Exception]) -> asyncio.Future[T]:
    """Call a function in an idle or new daemon thread, which does not keep the process alive.

    The future gets the function's value or, if it is one of `errors`, its exception. Any other
    exception is a bug: its traceback is printed, and the future gets an UnavailableError.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()
    result.add_done_callback(_retrieve_exception)

    def run() -> None:
        crashed = UnavailableError("the call failed unexpectedly; see the traceback in the log")
        settle = functools.partial(_set_exception, result, crashed)
        try:
            value = function()
        except errors as error:
            settle = functools.partial(_set_exception, result, error)
        else:
            settle = functools.partial(_set_result, result, value)
        finally:
            with contextlib.suppress(RuntimeError):  # the event loop has ended meanwhile
                loop.call_soon_threadsafe(settle)

    try:
        calls = idle.pop()
    except IndexError:
        calls = SimpleQueue()
        threading.Thread(target=_work, args=(calls,), name="gpu", daemon=True).start()
    calls.put(run)
    return result


def _work(calls: _Calls) -> None:
    while True:
        calls.get()()
        idle.append(calls)


class SingleFlight(Generic[T]):
    """Calls about several keys, with at most one call in flight for each key.

    Once a call has exceeded its limit, later callers do not wait for it, and no second call starts
    before it returns: a GPU that hangs must not delay each probe of the others. `errors` are those
    of `start_in_thread`.
    """

    def __init__(self, *errors: type[Exception]) -> None:
        self._errors = errors
        self._in_flight: dict[Hashable, asyncio.Future[T]] = {}
        self._overdue: set[Hashable] = set()

    async def call(
        self, key: Hashable, function: Callable[[], T], limit_s: Callable[[], float]
    ) -> T:
        """Return the function's value, or that of an earlier call that returns only now.

        Raises TimeoutError if there is none within `limit_s()`, which is read again while waiting.
        """
        flight = self._in_flight.get(key)
        if flight is None:
            flight = self._in_flight[key] = start_in_thread(function, *self._errors)
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not flight.done():
            remaining_s = began + limit_s() - loop.time()
            if remaining_s <= 0 or key in self._overdue:
                self._overdue.add(key)
                raise TimeoutError
            await asyncio.wait({flight}, timeout=min(remaining_s, LIMIT_CHECK_S))
        if self._in_flight.get(key) is flight:  # no other caller has started a new call meanwhile
            del self._in_flight[key]
            self._overdue.discard(key)
        return flight.result()


def _retrieve_exception(result: asyncio.Future[T]) -> None:
    """Prevent asyncio from logging an exception that has no waiter."""
    if not result.cancelled():
        result.exception()


def _set_result(result: asyncio.Future[T], value: T) -> None:
    if not result.done():
        result.set_result(value)


def _set_exception(result: asyncio.Future[T], error: Exception) -> None:
    if not result.done():
        result.set_exception(error)
