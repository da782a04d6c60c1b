"""The HTTP endpoints of a service: /healthz, /readyz and /metrics."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web import RequestPayloadError
from prometheus_client import REGISTRY, Gauge, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from shared.runtime.listener import Tls, listening
from shared.runtime.settings import digest, settings_digests

Probe = Callable[[], str | None]
"""Returns why something is not ready, or None."""
METRICS_PATH = "/metrics"
OPENMETRICS = "application/openmetrics-text"
RENDERED_S = 1.0
"""How long a rendering of the metrics is served."""


_SETTINGS = Gauge(
    "leasehold_settings_info",
    "1 for the digest of all settings in the environment of the process.",
    ["digest"],
)


def unready(probes: Mapping[str, Probe]) -> dict[str, str]:
    """Return the reasons why the service is not ready, by probe.

    >>> unready({"redis": lambda: None, "nats": lambda: "not connected"})
    {'nats': 'not connected'}
    """
    return {name: text for name, probe in probes.items() if (text := probe())}


def application(probes: Mapping[str, Probe]) -> web.Application:
    # Prometheus would store a series more for each counter.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    _SETTINGS.labels(digest(str(sorted(settings_digests().items())))).set(1)

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        missing = unready(probes)
        if not missing:
            return web.Response(text="ok\n")
        lines = "".join(f"{name}: {text}\n" for name, text in missing.items())
        return web.Response(status=503, text=lines)

    pages = metrics_application()
    pages.router.add_get("/healthz", healthz)
    pages.router.add_get("/readyz", readyz)
    return pages


def metrics_application(registry: Collector = REGISTRY) -> web.Application:
    """Serve OpenMetrics, which have exemplars, if accepted, or Prometheus' text.

    Anyone may read it, so all requests within a second get the same rendering.
    """
    rendered: dict[str, tuple[float, bytes]] = {}

    async def metrics(request: web.Request) -> web.Response:
        accepted = OPENMETRICS if OPENMETRICS in request.headers.get("Accept", "") else ""
        encode, content_type = choose_encoder(accepted)
        now = asyncio.get_running_loop().time()
        until, body = rendered.get(accepted, (0.0, b""))
        if now >= until:
            body = encode(registry)
            rendered[accepted] = now + RENDERED_S, body
        return web.Response(body=body, headers={"Content-Type": content_type})

    pages = web.Application()
    pages.router.add_get(METRICS_PATH, metrics)
    return pages


@contextlib.asynccontextmanager
async def served(
    pages: web.Application, address: str, *, flag: str = "--http", tls: Tls | None = None
) -> AsyncIterator[str]:
    """Serve on `HOST:PORT` (port 0: any free port) and yield the address.

    Raises RequestError, which names the flag, if the address is invalid or in use.
    """
    async with listening(pages, address, flag=flag, tls=tls) as (host, port):
        yield f"{host}:{port}"


LOGGER = "aiohttp.server"
SHOWN = 200


class BadRequestFilter(logging.Filter):
    """Requests that are not HTTP become debug lines."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError | RequestPayloadError):
            return True
        why = " ".join(str(error).split())[:SHOWN]
        message = record.getMessage()
        record.msg = "%s: not HTTP: %s"
        record.args = (message, why)
        record.levelno = logging.DEBUG
        record.levelname = logging.getLevelName(logging.DEBUG)
        record.exc_info = None
        record.exc_text = None
        return logging.getLogger(LOGGER).isEnabledFor(logging.DEBUG)


def suppress_bad_request_tracebacks() -> None:
    logger = logging.getLogger(LOGGER)
    if not any(isinstance(log_filter, BadRequestFilter) for log_filter in logger.filters):
        logger.addFilter(BadRequestFilter())
