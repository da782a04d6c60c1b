"""Cancelling tasks reliably: some library code swallows a cancellation."""

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Any

AGAIN_S = 1.0


async def end(task: "asyncio.Task[Any]", children: Iterable["asyncio.Task[Any]"] = ()) -> None:
    """Cancel a task until it has ended; raise its error, except CancelledError.

    `asyncio.wait_for` of Python 3.11 loses a cancellation that comes with the result, and a
    TaskGroup cancels its children only once: `children` are therefore cancelled again as well.
    """
    task.cancel()
    while not task.done():
        await asyncio.wait({task}, timeout=AGAIN_S)
        if not task.done():
            for one in (task, *children):
                one.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        task.result()
