"""Runs asynchronous servers in a thread, for tests that are not asynchronous."""

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def running_in_thread(servers: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Enter the context in another thread with an event loop, and leave it at the end."""
    entered: list[T] = []
    ready = threading.Event()
    failures = []
    stop = asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        async with servers as served:
            entered.append(served)
            ready.set()
            await stop.wait()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            failures.append(error)
            raise
        finally:
            ready.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready.wait()
    if failures:
        raise failures[0]
    try:
        yield entered[0]
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join()


class Tracebacks(logging.Handler):
    """Collects log records that have a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the record if it has one."""
        if record.exc_info and record.exc_info[0] is not None:
            self.found.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


@contextmanager
def without_tracebacks() -> Iterator[None]:
    """Fail if anything is logged with a traceback meanwhile."""
    handler = Tracebacks()
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
    texts = [text[:500] for text in handler.found]
    assert not texts, texts
