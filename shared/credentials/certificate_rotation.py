"""Rotation of a serving certificate: created at the first start, renewed halfway through its life.

A new CA is published one refresh before its certificate is used, and the previous CA stays trusted:
no call fails while replicas change one after the other.
"""

import asyncio
import logging
import ssl
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from pathlib import Path

from shared.credentials import certificates
from shared.credentials.certificate_stores import (
    FILES,
    CertificateBundle,
    CertificateStore,
    ends_at,
    is_valid,
    make,
)
from shared.credentials.certificates import is_due
from shared.credentials.serving_files import require_clients, server_context
from shared.credentials.tls import NO_PASSPHRASE
from shared.model.errors import LeaseholdError, RequestError

logger = logging.getLogger(__name__)

REFRESH_S = 10.0
"""How soon a changed file or Secret is used."""
PAUSE_S = 1.0
"""The pause after the certificate could not be loaded."""


class ServingCertificate:
    def __init__(
        self,
        store: CertificateStore,
        trust: Callable[[bytes], Awaitable[None]] | None,
        names: Sequence[str],
        now: Callable[[], datetime],
        *,
        client_ca: Path | None = None,
    ) -> None:
        self.store = store
        self.trust = trust
        self.names = tuple(names)
        self.now = now
        self.client_ca = client_ca
        """PEM file; None if `require` sets the authorities."""
        self.context = server_context()
        self._authorities = ""
        self.bundle: CertificateBundle | None = None
        self._next: CertificateBundle | None = None
        """Its CA is published, and its certificate is used from the next refresh on."""
        self._fault = ""

    def require(self, authorities: str) -> None:
        """Refuse new connections without a certificate of these authorities (PEM), and no others.

        Raises RequestError if they are invalid; the earlier ones stay.
        """
        if authorities != self._authorities:
            self.context = self._context_of(self.bundle, authorities)
            self._authorities = authorities

    def current_context(self) -> ssl.SSLContext:
        return self.context

    def unready_reason(self) -> str | None:
        if self.bundle is None:
            return f"no certificate yet{self._fault and f': {self._fault}'}"
        return None if is_valid(self.bundle, self.now()) else "the certificate has expired"

    @property
    def expires_at(self) -> float:
        return ends_at(self.bundle) if self.bundle else 0.0

    async def refresh(self) -> None:
        if self.client_ca is not None:
            self.require(await asyncio.to_thread(_read, self.client_ca))
        stored = await self.store.load()
        now = self.now()
        if stored is not None and stored != self.bundle:
            await asyncio.to_thread(self._check, stored)
        if stored is None or is_due(stored.certificate, self.names, now):
            fresh = await asyncio.to_thread(make, self.names, now, after=stored or self.bundle)
            if await self.store.save(fresh, after=stored):
                logger.info("created a certificate for %s", ", ".join(self.names))
            stored = await self.store.load() or fresh
        if self.trust is not None:
            await self.trust(stored.trusted)
        if stored != self.bundle and not self._must_wait(stored, now):
            await asyncio.to_thread(self._use, stored)

    def _check(self, stored: CertificateBundle) -> None:
        try:
            certificates.load(stored.certificate)
            self._context_of(stored, self._authorities)
            if stored.trusted:
                certificates.load_all(stored.trusted)
        except (RequestError, OSError) as error:  # ssl.SSLError is an OSError
            raise RequestError(
                f"the certificate in {self.store.place}, its key or its CA is invalid ({error}): "
                f"remove {FILES['certificate']} there, and another certificate is created"
            ) from error

    def _must_wait(self, stored: CertificateBundle, now: datetime) -> bool:
        """Return whether clients may not have the new CA yet."""
        published, self._next = self._next, stored
        current = self.bundle
        if current is None or not is_valid(current, now):
            return False
        if current.authority not in stored.trusted:
            return False
        return published != stored and stored.authority != current.authority

    def _use(self, bundle: CertificateBundle) -> None:
        self.context = self._context_of(bundle, self._authorities)
        self.bundle = bundle

    def _context_of(self, bundle: CertificateBundle | None, authorities: str) -> ssl.SSLContext:
        context = server_context()
        if authorities:
            require_clients(context, authorities)
        if bundle is not None:
            with tempfile.TemporaryDirectory() as directory:
                chain = Path(directory) / "tls.pem"  # ssl reads files only
                chain.touch(mode=0o600)
                chain.write_bytes(bundle.key + bundle.certificate)
                context.load_cert_chain(chain, password=NO_PASSPHRASE)
        return context

    async def run(self, pause: Callable[[float], Awaitable[None]]) -> None:
        while True:
            try:
                await self.refresh()
            except LeaseholdError as error:
                if str(error) != self._fault:
                    logger.warning("retrying to load the certificate: %s", error)
                self._fault = str(error)
                await pause(PAUSE_S)
                continue
            self._fault = ""
            await pause(REFRESH_S)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the CA of client certificates cannot be read: {error}") from error
