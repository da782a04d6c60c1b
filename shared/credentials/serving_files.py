"""A server's TLS context from files, such as those of a mounted Secret."""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

from shared.credentials.tls import NO_PASSPHRASE
from shared.model.errors import RequestError

logger = logging.getLogger(__name__)

RELOAD_S = 60.0
"""The interval at which the TLS files are read: a renewed certificate is used this late, at
most."""


def server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def require_clients(context: ssl.SSLContext, authorities: str) -> None:
    """Raises RequestError if no authority (PEM) is valid."""
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cadata=authorities)
    except (ssl.SSLError, ValueError) as error:
        raise RequestError(f"the CA of client certificates is invalid: {error}") from error


class ServingFiles:
    """With `client_ca`, clients need a certificate of that authority."""

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None = None) -> None:
        self.certificate = certificate
        self.key = key
        self.client_ca = client_ca
        self.context = server_context()
        self._loaded: bytes = b""
        self.load()

    def current_context(self) -> ssl.SSLContext:
        return self.context

    def load(self) -> None:
        """Raises RequestError if a file cannot be read or is invalid."""
        files = [path for path in (self.certificate, self.key, self.client_ca) if path is not None]
        try:
            content = b"".join(path.read_bytes() for path in files)
            if content == self._loaded:
                return
            context = server_context()
            context.load_cert_chain(self.certificate, self.key, password=NO_PASSPHRASE)
            if self.client_ca is not None:
                require_clients(context, self.client_ca.read_text())
        except (OSError, UnicodeDecodeError) as error:  # ssl.SSLError is an OSError
            names = ", ".join(map(str, files))
            raise RequestError(f"the TLS files {names} cannot be loaded: {error}") from error
        self.context = context
        self._loaded = content

    async def reload(self, pause: Callable[[float], Awaitable[None]]) -> None:
        while True:
            await pause(RELOAD_S)
            try:
                await asyncio.to_thread(self.load)
            except RequestError as error:
                logger.warning("the TLS files are loaded again in %g s: %s", RELOAD_S, error)
