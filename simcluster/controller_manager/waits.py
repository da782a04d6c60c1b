"""Waits for the first of several changes."""

import asyncio
from collections.abc import Awaitable, Iterable


async def first_of(waits: Iterable[Awaitable[None]], timeout_s: float | None = None) -> None:
    """Wait until one of several waits is over, for `timeout_s` at most."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
