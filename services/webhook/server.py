"""The webhook's HTTPS server for the API server."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import msgspec
from aiohttp import web

from services.webhook.registration import (
    ALL_PODS_PATH,
    ALLOCATIONS_PATH,
    CLAIMS_PATH,
    EXEMPT_PATH,
    PATH,
)
from shared.model.errors import RequestError

MAX_BODY_BYTES = 8 * 1024 * 1024
"""An API server's request is at most 3 MiB; a review holds one object, or also its old version."""


class Review(Protocol):
    """Responds to the body of one AdmissionReview."""

    def __call__(
        self, body: bytes, *, exempt: bool = ..., all_pods: bool = ..., claims: bool = ...
    ) -> Awaitable[bytes]:
        """Respond; the namespace is `exempt`, or has `all_pods` placed by Leasehold.

        `claims`: ResourceClaims may be for GPUs.
        """
        ...


@dataclass(slots=True)
class Drain:
    """Shutdown of a replica: API servers call it for a while after it is no longer ready."""

    drain_s: float = 0.0
    started: bool = False

    async def start(self) -> None:
        """Respond for another `drain_s` seconds; close each connection after its next response."""
        self.started = True
        await asyncio.sleep(self.drain_s)


def application(review: Review, drain: Drain) -> web.Application:
    """Build the application to which the API server posts reviews."""

    async def mutate(request: web.Request) -> web.Response:
        try:
            body = await review(
                await request.read(),
                exempt=request.path == EXEMPT_PATH,
                all_pods=request.path == ALL_PODS_PATH,
                claims=request.path == CLAIMS_PATH,
            )
            response = web.Response(body=body, content_type="application/json")
        except RequestError as error:
            body = msgspec.json.encode({"error": str(error)})
            response = web.Response(body=body, status=400, content_type="application/json")
        if drain.started:
            response.force_close()
        return response

    routes = web.Application(client_max_size=MAX_BODY_BYTES)
    for path in (PATH, EXEMPT_PATH, ALL_PODS_PATH, CLAIMS_PATH, ALLOCATIONS_PATH):
        routes.router.add_post(path, mutate)
    return routes


@asynccontextmanager
async def serving_reviews(
    review: Review, address: str, context: ssl.SSLContext, drain: Drain | None = None
) -> AsyncIterator[tuple[str, int]]:
    """Listen on `HOST:PORT` (port 0: any free one) and yield the real host and port.

    Raises RequestError if the address is not available. It ends after all reviews in progress.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise RequestError(f"--listen {address!r} is not HOST:PORT")
    runner = web.AppRunner(
        application(review, drain or Drain()), access_log=None, shutdown_timeout=5.0
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host.strip("[]") or None, int(port), ssl_context=context)
        try:
            await site.start()
        except OSError as error:
            raise RequestError(f"--listen {address}: {error.strerror}; use a free port") from error
        bound = runner.addresses[0]
        yield str(bound[0]), int(bound[1])
    finally:
        await runner.cleanup()
