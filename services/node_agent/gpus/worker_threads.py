"""Blocking questions in threads of their own: one that never comes back holds up nothing else."""

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from shared.model.errors import UnavailableError

T = TypeVar("T")

LIMIT_CHECK_S = 0.5
"""How often the limit of an answer is looked at."""


def start_in_thread(question: Callable[[], T], *errors: type[Exception]) -> asyncio.Future[T]:
    """Begin in a thread that keeps neither the other threads busy nor the process alive.

    The answer is what the question returns, or which of `errors` it raises. Whatever else it raises
    is a bug: its traceback is printed, and the answer is an UnavailableError.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()
    answer.add_done_callback(_noticed)

    def ask() -> None:
        broken = UnavailableError("the question broke off; why is in the agent's log")
        settle = functools.partial(_settle_wrong, answer, broken)
        try:
            found = question()
        except errors as error:
            settle = functools.partial(_settle_wrong, answer, error)
        else:
            settle = functools.partial(_settle, answer, found)
        finally:
            with contextlib.suppress(RuntimeError):  # the loop ended in the meantime
                loop.call_soon_threadsafe(settle)

    threading.Thread(target=ask, name="gpu", daemon=True).start()
    return answer


class SingleFlight(Generic[T]):
    """Questions about several things, of each thing one at a time.

    What has not answered in time is not asked again before it has, and meanwhile nobody waits for
    it: a GPU that hangs must not hold up every look at the others. `errors` are as for `begun`.
    """

    def __init__(self, *errors: type[Exception]) -> None:
        self._errors = errors
        self._asked: dict[Hashable, asyncio.Future[T]] = {}
        self._late: set[Hashable] = set()

    async def call(
        self, about: Hashable, question: Callable[[], T], limit_s: Callable[[], float]
    ) -> T:
        """Return the answer, be it to a question that was put before and is answered only now.

        Raises TimeoutError if there is none within `limit_s`, which is looked at all the time.
        """
        asked = self._asked.get(about)
        if asked is None:
            asked = self._asked[about] = start_in_thread(question, *self._errors)
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not asked.done():
            left_s = began + limit_s() - loop.time()
            if left_s <= 0 or about in self._late:
                self._late.add(about)
                raise TimeoutError
            await asyncio.wait({asked}, timeout=min(left_s, LIMIT_CHECK_S))
        if self._asked.get(about) is asked:  # nobody has begun anew in the meantime
            del self._asked[about]
            self._late.discard(about)
        return asked.result()


def _noticed(answer: asyncio.Future[T]) -> None:
    """Keep asyncio from complaining of an error for which nobody waits any more."""
    if not answer.cancelled():
        answer.exception()


def _settle(answer: asyncio.Future[T], found: T) -> None:
    if not answer.done():
        answer.set_result(found)


def _settle_wrong(answer: asyncio.Future[T], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
