"""Waits for an event for a limited time."""

import asyncio


async def wait_for_event(event: asyncio.Event, timeout_s: float) -> bool:
    """Return whether the event was set, as soon as it is, or after `timeout_s` seconds."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
