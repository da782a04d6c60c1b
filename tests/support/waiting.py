"""Waiting for a condition: the only way in which tests wait."""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 60.0
PAUSE_S = 0.01


async def until(condition: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    """Wait until `condition` returns, or awaits to, something true, and return that."""
    async with asyncio.timeout(limit_s):
        while True:
            found = condition()
            if inspect.isawaitable(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(PAUSE_S)


def until_blocking(condition: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    """Wait as `until` does, in a test without an event loop."""
    end = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < end, f"not true within {limit_s:g} s"
        time.sleep(PAUSE_S)
    return found
