"""The webhook's HTTPS server for the API server."""

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import msgspec
from aiohttp import web

from services.webhook.admission_review import late_response
from services.webhook.registration import (
    ALL_PODS_PATH,
    CLAIMS_PATH,
    EXEMPT_PATH,
    webhook_paths,
)
from services.webhook.service import Webhook
from shared.model.errors import RequestError
from shared.runtime.client_certificates import certificate_required

MAX_BODY_BYTES = 24 * 1024 * 1024
"""A review holds one object, or also its old version. An API server stores objects of 1.5 MiB in
its own encoding, which are up to eight times as long in JSON."""
SMALL_BODY_BYTES, HEAD_BYTES = 256 * 1024, 4096
LARGE_AT_ONCE = 4
"""Larger bodies that are read at once, which bounds memory."""
USUAL_TIMEOUT_S = 2.0
"""For clients that do not say how long they wait."""
_UID = re.compile(rb'"uid": *"([^"\\\\]+)"')
"""The first one is that of the review, in the order in which API servers write."""
_TIMEOUT = re.compile(r"(\d+)s")


@dataclass(slots=True)
class Drain:
    """Shutdown of a replica: API servers call it for a while after it is no longer ready."""

    drain_s: float = 0.0
    started: bool = False

    async def start(self) -> None:
        """Respond for another `drain_s` seconds; close each connection after its next response."""
        self.started = True
        await asyncio.sleep(self.drain_s)


def application(
    webhook: Webhook,
    drain: Drain,
    paths: Callable[[], Collection[str]],
    client_name: str = "",
) -> web.Application:
    """Build the application to which the API server posts reviews, at the registered `paths`.

    A webhook that knows its callers serves only those with a certificate for `client_name`.
    """
    large = asyncio.Semaphore(LARGE_AT_ONCE)

    async def mutate(request: web.Request) -> web.Response:
        if request.path not in paths():
            raise web.HTTPNotFound
        all_pods = request.path == ALL_PODS_PATH
        deadline = asyncio.get_running_loop().time() + _timeout_s(request) / 2
        try:
            async with _body(request, deadline, large) as (complete, read):
                body = (
                    await webhook.review(
                        read,
                        exempt=request.path == EXEMPT_PATH,
                        all_pods=all_pods,
                        claims=request.path == CLAIMS_PATH,
                        deadline=deadline,
                    )
                    if complete
                    else late_response(_uid(read), all_pods=all_pods)
                )
            response = web.Response(body=body, content_type="application/json")
        except RequestError as error:
            body = msgspec.json.encode({"error": str(error)})
            response = web.Response(body=body, status=400, content_type="application/json")
        if drain.started:
            response.force_close()
        return response

    checks = [certificate_required(client_name)] if webhook.knows_callers else []
    routes = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=checks)
    for path in sorted(set(webhook_paths().values())):
        routes.router.add_post(path, mutate)
    return routes


@asynccontextmanager
async def _body(
    request: web.Request, deadline: float, large: asyncio.Semaphore
) -> AsyncIterator[tuple[bool, bytes]]:
    """Yield whether the body was read before the deadline, and what was read of it."""
    head = await request.content.read(HEAD_BYTES)
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.timeout_at(deadline):
                if (request.content_length or MAX_BODY_BYTES) > SMALL_BODY_BYTES:
                    await stack.enter_async_context(large)
                body = head + await request.read()
        except TimeoutError:
            yield False, head
        else:
            yield True, body


def _timeout_s(request: web.Request) -> float:
    found = _TIMEOUT.fullmatch(request.query.get("timeout", ""))
    return float(found[1]) if found else USUAL_TIMEOUT_S


def _uid(head: bytes) -> str:
    found = _UID.search(head)
    return found[1].decode(errors="replace") if found else ""


@asynccontextmanager
async def serving_reviews(
    webhook: Webhook,
    address: str,
    context: ssl.SSLContext,
    *,
    paths: Callable[[], Collection[str]],
    drain: Drain | None = None,
    client_name: str = "",
) -> AsyncIterator[tuple[str, int]]:
    """Listen on `HOST:PORT` (port 0: any free one) and yield the real host and port.

    Raises RequestError if the address is not available. It ends after all reviews in progress.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise RequestError(f"--listen {address!r} is not HOST:PORT")
    routes = application(webhook, drain or Drain(), paths, client_name)
    runner = web.AppRunner(routes, access_log=None, shutdown_timeout=5.0)
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
