"""Authorities and certificates for tests, a nats-server and a valkey-server that show them."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from shared.credentials import certificates
from shared.credentials.certificates import IssuedCertificate

HERE = ("127.0.0.1", "localhost")


class Made:
    """An authority, and files of what it issues."""

    def __init__(self, folder: Path, name: str = "ours") -> None:
        self.folder = folder / name
        self.folder.mkdir(parents=True)
        self.authority = certificates.authority(name, datetime.now(UTC), days=3650)
        self.ca = self.folder / "ca.crt"
        self.ca.write_bytes(self.authority.certificate)

    def issue(self, name: str, *names: str, made_days_ago: float = 0) -> tuple[Path, Path]:
        """Write a certificate of thirty days for these names, and its key."""
        at = datetime.now(UTC) - timedelta(days=made_days_ago)
        issued = certificates.issue(self.authority, names or HERE, at, days=30, client=True)
        return self.write(name, issued)

    def write(self, name: str, issued: IssuedCertificate) -> tuple[Path, Path]:
        """Write a certificate and its key under a name."""
        certificate, key = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        certificate.write_bytes(issued.certificate)
        key.write_bytes(issued.key)
        return certificate, key


class Cover:
    """A proxy that terminates TLS for a server on a unix socket, as a managed Redis does."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.port = 0
        self._open: set[asyncio.StreamWriter] = set()

    def show(self, files: tuple[Path, Path], *, client_ca: Path | None = None) -> None:
        """Serve a certificate from now on, and require one of the authority `client_ca`."""
        self.context.load_cert_chain(*files)
        if client_ca is not None:
            self.context.load_verify_locations(client_ca)
            self.context.verify_mode = ssl.CERT_REQUIRED

    @property
    def url(self) -> str:
        return f"rediss://127.0.0.1:{self.port}/0"

    def drop(self) -> None:
        """End every connection."""
        for writer in list(self._open):
            writer.transport.abort()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator["Cover"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.context)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            self.drop()
            server.close()
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(str(self.socket))
        both = {writer, inner_writer}
        self._open |= both
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_pass_on(reader, inner_writer))
                tasks.create_task(_pass_on(inner_reader, writer))
        finally:
            self._open -= both


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()
