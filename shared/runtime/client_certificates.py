"""Callers that are known by their client certificates."""

import logging
import ssl
import time

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

logger = logging.getLogger(__name__)


def certificate_required(name: str) -> Middleware:
    """Serve only callers with a certificate for this DNS name, or for any if it is empty.

    TLS verifies the certificate when a connection is opened, not that it has expired since.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        certificate = request.get_extra_info("peercert") or {}
        names = {text for kind, text in certificate.get("subjectAltName", ()) if kind == "DNS"}
        if certificate and ssl.cert_time_to_seconds(certificate["notAfter"]) < time.time():
            expired = f"the certificate has expired at {certificate['notAfter']}"
            logger.warning("a caller at %s is refused: %s", request.remote, expired)
            refused = web.Response(status=403, text=f"{expired}\n")
            refused.force_close()
            return refused
        if certificate and (not name or name in names):
            return await handler(request)
        missing = f"a certificate for {name}" if name else "a client certificate"
        has = f"one for {', '.join(sorted(names)) or 'no name'}" if certificate else "none"
        logger.warning("a caller at %s needs %s, and has %s", request.remote, missing, has)
        return web.Response(status=403, text=f"{missing} is required\n")

    return check
