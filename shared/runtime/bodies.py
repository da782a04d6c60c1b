"""The bodies of requests: read while they make progress, within a bound for all of them."""

import asyncio

from aiohttp import web

BODY: web.RequestKey[bytes] = web.RequestKey("body", bytes)
ARRIVED: web.RequestKey[float] = web.RequestKey("arrived", float)
"""By the event loop's clock."""
PROGRESS_S = 1.0
"""The interval of checks that a body still arrives fast enough."""
PROGRESS_BYTES = 64 * 1024
"""A body that has a turn loses it when fewer bytes have arrived in `PROGRESS_S`."""


class SlowBodyError(Exception):
    def __init__(self, head: bytes) -> None:
        super().__init__("the body of the request did not arrive in time")
        self.head = head


async def read_body(request: web.Request, *, most: int, deadline: float, has_turn: bool) -> bytes:
    """Read a body that has arrived by the deadline, on the loop's clock.

    Raises SlowBodyError and HTTPRequestEntityTooLarge.
    """
    loop = asyncio.get_running_loop()
    body = bytearray()
    checked = loop.time()
    arrived = 0
    while True:
        until = min(deadline, checked + PROGRESS_S) if has_turn else deadline
        try:
            async with asyncio.timeout_at(until):
                chunk = await request.content.readany()
        except TimeoutError as error:
            raise SlowBodyError(bytes(body)) from error
        if not chunk:
            return bytes(body)
        body += chunk
        if len(body) > most:
            raise web.HTTPRequestEntityTooLarge(max_size=most, actual_size=len(body))
        now = loop.time()
        if now >= checked + PROGRESS_S:
            if has_turn and len(body) - arrived < PROGRESS_BYTES:
                raise SlowBodyError(bytes(body))
            checked = now
            arrived = len(body)
