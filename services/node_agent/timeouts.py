"""Waiting for something to happen, but not for ever."""

import asyncio


async def set_within(event: asyncio.Event, seconds: float) -> bool:
    """Return as soon as the event is set, or after so many seconds; tell whether it is set."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
