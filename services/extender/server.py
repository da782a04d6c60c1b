"""The extender's HTTPS server: /filter, /prioritize and /bind for kube-scheduler."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import Counter, Histogram

from services.extender.scheduler_api import (
    ExtenderArgs,
    ExtenderBindingArgs,
    ExtenderBindingResult,
    ExtenderFilterResult,
    HostPriority,
)
from services.extender.service import Extender
from shared.model.errors import UNDECODABLE, RequestError
from shared.runtime.bodies import BODY
from shared.runtime.client_certificates import certificate_required
from shared.runtime.connections import PortBounds
from shared.runtime.listener import BOUNDS

REQUESTS = Counter(
    "leasehold_extender_requests",
    "Requests of kube-scheduler by verb (filter, prioritize, bind) and outcome: ok, refused (no "
    "node fits, or the pod was not bound), error (no verdict).",
    ["verb", "outcome"],
)
SECONDS = Histogram(
    "leasehold_extender_request_seconds",
    "Time to reply to a request of kube-scheduler.",
    ["verb"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
)


logger = logging.getLogger(__name__)

PORT_BOUNDS = PortBounds(body_bytes=16 * 1024 * 1024)
"""A pod is at most 3 MiB; 15,000 names of 253 characters are less than 4 MiB."""
T = TypeVar("T")
Reply = ExtenderFilterResult | ExtenderBindingResult | list[HostPriority]


def application(extender: Extender, client_name: str) -> web.Application:
    """Serve only callers with a certificate for `client_name`."""

    async def filter_nodes(args: ExtenderArgs) -> ExtenderFilterResult:
        return extender.filter(args)

    async def prioritize(args: ExtenderArgs) -> list[HostPriority]:
        return extender.prioritize(args)

    async def bind(args: ExtenderBindingArgs) -> ExtenderBindingResult:
        # kube-scheduler may stop waiting; what was begun is finished nevertheless.
        result = await asyncio.shield(extender.bind(args))
        if result.error:
            logger.info("pod %s/%s is not bound: %s", args.namespace, args.name, result.error)
        return result

    pages = web.Application(middlewares=[certificate_required(client_name), _bad_requests])
    pages[BOUNDS] = PORT_BOUNDS
    pages.router.add_post("/filter", _handler("filter", ExtenderArgs, filter_nodes))
    pages.router.add_post("/prioritize", _handler("prioritize", ExtenderArgs, prioritize))
    pages.router.add_post("/bind", _handler("bind", ExtenderBindingArgs, bind))
    return pages


def _handler(verb: str, kind: type[T], answer: Callable[[T], Awaitable[Reply]]) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        started = time.perf_counter()
        result = await answer(_decode(request[BODY], kind))
        REQUESTS.labels(verb, _outcome_of(result)).inc()
        SECONDS.labels(verb).observe(time.perf_counter() - started)
        return web.Response(body=msgspec.json.encode(result), content_type="application/json")

    return handle


@web.middleware
async def _bad_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as error:
        return web.Response(status=400, text=f"{error}\n")


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except UNDECODABLE as error:
        raise RequestError(f"the body is no valid {kind.__name__}: {error}") from error


def _outcome_of(result: Reply) -> str:
    match result:
        case ExtenderBindingResult():
            return "refused" if result.error else "ok"
        case ExtenderFilterResult():
            return "error" if result.error else "ok" if result.node_names else "refused"
        case _:
            return "ok" if result else "error"
