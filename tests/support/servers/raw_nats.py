"""Clients of NATS that speak its protocol by hand, and do what no library lets them do."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Login:
    """How a client connects."""

    port: int
    user: str
    secret: str
    tls: ssl.SSLContext | None = None


class RawClient:
    """One authorized connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @property
    def is_closed(self) -> bool:
        return self.reader._eof or self.writer.is_closing()  # type: ignore[attr-defined]

    async def send(self, data: bytes) -> None:
        """Send, unless the server has closed the connection."""
        with contextlib.suppress(OSError):
            self.writer.write(data)
            await self.writer.drain()

    async def replies(self) -> bytes:
        """Return what the server has sent until it answers a ping, or has closed the connection."""
        await self.send(b"PING\r\n")
        received = b""
        with contextlib.suppress(OSError):
            while b"PONG" not in received and (data := await self.reader.read(65_536)):
                received += data
        return received

    def close(self) -> None:
        self.writer.transport.abort()


async def open_raw(login: Login) -> RawClient:
    """Connect and log in. Raises ConnectionError unless the server accepts that."""
    client = RawClient(*await asyncio.open_connection("127.0.0.1", login.port))
    try:
        received = await _log_in(client, login)
    except BaseException:
        client.close()
        raise
    if b"PONG" not in received:
        client.close()
        raise ConnectionError(received.decode(errors="replace"))
    return client


async def _log_in(client: RawClient, login: Login) -> bytes:
    await client.reader.readline()
    if login.tls is not None:
        await client.writer.start_tls(login.tls, server_hostname="127.0.0.1")
    options = {"user": login.user, "pass": login.secret, "verbose": False, "protocol": 1}
    await client.send(b"CONNECT " + json.dumps(options).encode() + b"\r\n")
    return await client.replies()


@contextlib.asynccontextmanager
async def raw_clients(login: Login, count: int) -> AsyncIterator[list[RawClient]]:
    """Connect several times, at most 20 at once; a connection that fails is left out."""
    free = asyncio.Semaphore(20)
    clients = list[RawClient]()

    async def connect() -> None:
        async with free:
            with contextlib.suppress(OSError):
                clients.append(await open_raw(login))

    await asyncio.gather(*(connect() for _ in range(count)))
    try:
        yield clients
    finally:
        for client in clients:
            client.close()


def peak_mib(pid: int) -> int:
    """Return the most memory that a process has had, MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    peak = next(line for line in lines if line.startswith("VmHWM"))
    return int(peak.split()[1]) // 1024
