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
        logger.warning(
            "a caller at %s has a certificate for %s, not for %s",
            request.remote,
            ", ".join(sorted(names)) or "no name",
            name,
        )
        return web.Response(status=403, text=f"certificate is not for {name}\n")

    return check
