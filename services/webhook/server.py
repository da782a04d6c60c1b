"""The webhook's HTTPS server for the API server."""

import asyncio
import re
from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager
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
from shared.runtime.bodies import BODY
from shared.runtime.client_certificates import certificate_required
from shared.runtime.connections import PortBounds
from shared.runtime.listener import BOUNDS, Tls, listening

PORT_BOUNDS = PortBounds(
    connections=512,
    body_bytes=24 * 1024 * 1024,
    free_body_bytes=32 * 1024,
    idle_s=120.0,
)
"""An API server has up to 200 writes in progress, and closes idle connections after 90 s.

A review may hold two objects. An API server stores objects of 1.5 MiB in its own encoding, which
are up to eight times as long in JSON.
"""
USUAL_TIMEOUT_S = 2.0
"""Of clients that do not name theirs."""
LONGEST_TIMEOUT_S = 30.0
"""The longest timeout that API servers have."""
SHUTDOWN_S = 5.0
"""How long requests in progress may take after the drain."""
_UID = re.compile(rb'"uid": *"([^"\\\\]+)"')
"""The first is that of the review."""
_TIMEOUT = re.compile(r"(\d{1,3})s")


@dataclass(slots=True)
class Drain:
    """API servers call a replica for a while after it is no longer ready."""

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
    """`paths` are registered; `client_name` is that in callers' certificates."""

    async def mutate(request: web.Request) -> web.Response:
        if request.path not in paths():
            raise web.HTTPNotFound
        all_pods = request.path == ALL_PODS_PATH
        try:
            body = await webhook.review(
                request[BODY],
                exempt=request.path == EXEMPT_PATH,
                all_pods=all_pods,
                claims=request.path == CLAIMS_PATH,
            )
            response = web.Response(body=body, content_type="application/json")
        except RequestError as error:
            body = msgspec.json.encode({"error": str(error)})
            response = web.Response(body=body, status=400, content_type="application/json")
        if drain.started:
            response.force_close()
        return response

    checks = [certificate_required(client_name)] if webhook.knows_callers else []
    routes = web.Application(middlewares=checks)
    routes[BOUNDS] = PORT_BOUNDS
    for path in sorted(set(webhook_paths().values())):
        routes.router.add_post(path, mutate)
    return routes


def _review_s(request: web.Request) -> float:
    timeout = _TIMEOUT.fullmatch(request.query.get("timeout", ""))
    return min(float(timeout[1]), LONGEST_TIMEOUT_S) / 2 if timeout else USUAL_TIMEOUT_S / 2


def _late(request: web.Request, head: bytes) -> web.Response:
    """A webhook that fails open would let the pod in."""
    match = _UID.search(head)
    uid = match[1].decode(errors="replace") if match else ""
    body = late_response(uid, all_pods=request.path == ALL_PODS_PATH)
    return web.Response(body=body, content_type="application/json")


def serving_reviews(
    webhook: Webhook,
    address: str,
    tls: Tls,
    *,
    paths: Callable[[], Collection[str]],
    drain: Drain | None = None,
    client_name: str = "",
) -> AbstractAsyncContextManager[tuple[str, int]]:
    """Yield the real host and port, until no review is in progress. Raises RequestError."""
    return listening(
        application(webhook, drain or Drain(), paths, client_name),
        address,
        flag="--listen",
        tls=tls,
        body_time=_review_s,
        late=_late,
        shutdown_s=SHUTDOWN_S,
    )
