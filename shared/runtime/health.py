"""The HTTP endpoints of a service: /healthz, /readyz and /metrics."""

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from ssl import SSLContext

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest

from shared.model.errors import RequestError

Probe = Callable[[], str | None]
"""Says what is not ready, or None."""


def unready(probes: Mapping[str, Probe]) -> dict[str, str]:
    """Return the reasons why the service is not ready, by probe."""
    said = {name: probe() for name, probe in probes.items()}
    return {name: text for name, text in said.items() if text}


def application(probes: Mapping[str, Probe]) -> web.Application:
    """Build the endpoints. /healthz responds while the event loop runs; /readyz lists reasons."""

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        missing = unready(probes)
        if not missing:
            return web.Response(text="ok\n")
        lines = "".join(f"{name}: {text}\n" for name, text in missing.items())
        return web.Response(status=503, text=lines)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(REGISTRY), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    pages = web.Application()
    pages.router.add_get("/healthz", healthz)
    pages.router.add_get("/readyz", readyz)
    pages.router.add_get("/metrics", metrics)
    return pages


@contextlib.asynccontextmanager
async def served(
    pages: web.Application, address: str, *, flag: str = "--http", tls: SSLContext | None = None
) -> AsyncIterator[str]:
    """Serve the endpoints on `HOST:PORT` (port 0: any free port) and yield the address.

    With `tls`, over TLS; what its context shows may change while it serves.

    Raises RequestError, naming the flag it came from, if the address cannot be had.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise RequestError(f"{flag} {address!r} is not HOST:PORT")
    runner = web.AppRunner(pages, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host.strip("[]") or None, int(port), ssl_context=tls)
        try:
            await site.start()
        except OSError as error:
            raise RequestError(f"{flag} {address}: {error.strerror}; give a free port") from error
        bound = runner.addresses[0]
        yield f"{bound[0]}:{bound[1]}"
    finally:
        await runner.cleanup()
