"""The extender's HTTPS server: /filter, /prioritize and /bind for kube-scheduler."""

import asyncio
import logging
import time
from typing import TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import Counter, Histogram

from services.extender.scheduler_api import (
    ExtenderArgs,
    ExtenderBindingArgs,
    ExtenderBindingResult,
    ExtenderFilterResult,
)
from services.extender.service import Extender
from shared.model.errors import RequestError

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

MAX_BODY_BYTES = 16 * 1024 * 1024
"""A pod is at most 3 MiB; 15,000 names of 253 characters are less than 4 MiB."""
T = TypeVar("T")


def count(verb: str, outcome: str, seconds: float) -> None:
    """Count one request."""
    REQUESTS.labels(verb, outcome).inc()
    SECONDS.labels(verb).observe(seconds)


def application(extender: Extender, client_name: str) -> web.Application:
    """Build the application; only callers with a certificate for `client_name` are served."""

    async def filter_nodes(request: web.Request) -> web.Response:
        started = time.perf_counter()
        args = _decode(await request.read(), ExtenderArgs)
        result = extender.filter(args)
        count("filter", _outcome_of(result), time.perf_counter() - started)
        return _reply(result)

    async def prioritize(request: web.Request) -> web.Response:
        started = time.perf_counter()
        scores = extender.prioritize(_decode(await request.read(), ExtenderArgs))
        count("prioritize", "ok" if scores else "error", time.perf_counter() - started)
        return _reply(scores)

    async def bind(request: web.Request) -> web.Response:
        started = time.perf_counter()
        args = _decode(await request.read(), ExtenderBindingArgs)
        # kube-scheduler may stop waiting; what was begun is finished nevertheless.
        result: ExtenderBindingResult = await asyncio.shield(extender.bind(args))
        if result.error:
            logger.info("pod %s/%s is not bound: %s", args.namespace, args.name, result.error)
        outcome = "refused" if result.error else "ok"
        count("bind", outcome, time.perf_counter() - started)
        return _reply(result)

    pages = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_authorized(client_name)])
    pages.router.add_post("/filter", filter_nodes)
    pages.router.add_post("/prioritize", prioritize)
    pages.router.add_post("/bind", bind)
    return pages


def _authorized(client_name: str) -> Middleware:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        certificate = request.get_extra_info("peercert") or {}
        names = {name for kind, name in certificate.get("subjectAltName", ()) if kind == "DNS"}
        if client_name not in names:
            logger.warning(
                "a caller at %s has a certificate for %s, not for %s",
                request.remote,
                ", ".join(sorted(names)) or "no name",
                client_name,
            )
            return web.Response(status=403, text=f"certificate is not for {client_name}\n")
        try:
            return await handler(request)
        except RequestError as error:
            return web.Response(status=400, text=f"{error}\n")

    return check


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is no valid {kind.__name__}: {error}") from error


def _reply(result: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(result), content_type="application/json")


def _outcome_of(result: ExtenderFilterResult) -> str:
    if result.error:
        return "error"
    return "ok" if result.node_names else "refused"
