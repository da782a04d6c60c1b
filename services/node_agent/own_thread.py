"""Blocking questions in threads of their own: one that never comes back holds up nothing else."""

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def begun(question: Callable[[], T], *errors: type[Exception]) -> asyncio.Future[T]:
    """Begin in a thread that keeps neither the other threads busy nor the process alive.

    The answer is what the question returns, or which of `errors` it raises.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()
    answer.add_done_callback(_noticed)

    def ask() -> None:
        try:
            found = question()
        except errors as error:
            settle = functools.partial(_settle_wrong, answer, error)
        else:
            settle = functools.partial(_settle, answer, found)
        with contextlib.suppress(RuntimeError):  # the loop ended in the meantime
            loop.call_soon_threadsafe(settle)

    threading.Thread(target=ask, name="gpu", daemon=True).start()
    return answer


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
