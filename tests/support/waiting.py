"""Waiting for a condition: the only way in which tests wait."""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 60.0
PAUSE_S = 0.01
MAX_PAUSE_S = 0.1
LONGEST_PAUSE_S = 0.5
SHOWN = 2_000
"""Characters of the last value that a failure shows."""


async def until(
    read: Callable[[], Any], wanted: Callable[[Any], object] = bool, *, limit_s: float = LIMIT_S
) -> Any:
    """Read, or await, a value until it is `wanted`, and return it.

    Raises AssertionError, which shows the last value, after `limit_s`. The pause between two reads
    is about a tenth of the wait so far, and at least as long as the read before it, so that long
    waits and expensive reads leave the processor to others.
    """
    began_at = time.monotonic()
    result = None
    try:
        async with asyncio.timeout(limit_s):
            while True:
                read_at = time.monotonic()
                value = read()
                result = await value if inspect.isawaitable(value) else value
                if wanted(result):
                    return result
                took_s = time.monotonic() - read_at
                await asyncio.sleep(max(_pause_s(began_at), min(took_s, LONGEST_PAUSE_S)))
    except TimeoutError as error:
        raise AssertionError(f"not within {limit_s:g} s; at last: {result!r:.{SHOWN}}") from error


def until_blocking(condition: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    """Wait as `until` does, in a test without an event loop."""
    began_at = time.monotonic()
    while not (result := condition()):
        assert time.monotonic() < began_at + limit_s, f"not true within {limit_s:g} s"
        time.sleep(_pause_s(began_at))
    return result


def _pause_s(began_at: float) -> float:
    return min(max((time.monotonic() - began_at) / 10, PAUSE_S), MAX_PAUSE_S)
