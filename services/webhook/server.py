"""The webhook's doors: /mutate for the API server, over TLS."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from services.webhook.registration import PATH
from shared.model.errors import RequestError

MAX_BODY_BYTES = 8 * 1024 * 1024
"""An API server's request is 3 MiB at the most; a review holds one object, or an old one, too."""

Review = Callable[[Any], Awaitable[dict[str, Any]]]


@dataclass(slots=True)
class Leaving:
    """The end of a replica: API servers learn only after a while that they are to call another."""

    drain_s: float = 0.0
    begun: bool = False

    async def begin(self) -> None:
        """Answer on for the time, and have every connection closed after its next answer."""
        self.begun = True
        await asyncio.sleep(self.drain_s)


def application(review: Review, leaving: Leaving) -> web.Application:
    """Build the page that reviews are sent to."""

    async def mutate(request: web.Request) -> web.Response:
        try:
            told = web.json_response(await review(json.loads(await request.read())))
        except (RequestError, ValueError) as error:
            told = web.json_response({"error": str(error)}, status=400)
        if leaving.begun:
            told.force_close()
        return told

    pages = web.Application(client_max_size=MAX_BODY_BYTES)
    pages.router.add_post(PATH, mutate)
    return pages


@asynccontextmanager
async def listening(
    review: Review, address: str, context: ssl.SSLContext, leaving: Leaving | None = None
) -> AsyncIterator[tuple[str, int]]:
    """Listen on `HOST:PORT` (port 0: any free one) and yield the real host and port.

    Raises RequestError if the address cannot be had. Reviews under way are answered before it ends.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise RequestError(f"--listen {address!r} is not HOST:PORT")
    runner = web.AppRunner(
        application(review, leaving or Leaving()), access_log=None, shutdown_timeout=5.0
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host.strip("[]") or None, int(port), ssl_context=context)
        try:
            await site.start()
        except OSError as error:
            raise RequestError(f"--listen {address}: {error.strerror}; give a free port") from error
        bound = runner.addresses[0]
        yield str(bound[0]), int(bound[1])
    finally:
        await runner.cleanup()
