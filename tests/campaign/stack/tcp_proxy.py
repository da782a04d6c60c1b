"""A proxy between one part and one server, which holds back bytes, delays or loses them."""

import asyncio
import contextlib
import json
from pathlib import Path

HOST = "127.0.0.1"
_CHUNK = 1 << 16


class TcpProxy:
    """Forwards connections to a port; `cut` holds all bytes back until `heal`.

    Half-open, a request arrives and no answer does. Whoever lost an answer loses the connection
    when that ends.
    """

    def __init__(self, upstream: int) -> None:
        self.upstream = upstream
        self.port = 0
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._delay_s = 0.0
        self._loses_answers = False
        self._incomplete: set[asyncio.StreamWriter] = set()
        """Connections of which bytes were lost."""

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._serve, HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Hold back all bytes in both directions, as a lost route does."""
        self._open.clear()

    def spoil(self, way: str, delay_s: float = 0.0) -> None:
        """Begin a fault: cut, half-open, or slow, which delays all bytes."""
        match way:
            case "cut":
                self.cut()
            case "half-open":
                self._loses_answers = True
            case _:
                self._delay_s = delay_s

    def heal(self) -> None:
        """Let held and new bytes through; end connections that have lost some."""
        self._delay_s = 0.0
        self._loses_answers = False
        self._open.set()
        for writer in self._incomplete:
            writer.close()
        self._incomplete.clear()

    @property
    def is_used(self) -> bool:
        """Whether a connection is open."""
        return bool(self._connections)

    async def close(self) -> None:
        """End all connections, and take no more."""
        if self._server is not None:
            self._server.close()
        connections = tuple(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        self._connections.add(connection)
        try:
            await self._open.wait()
            up_reader, up_writer = await self._connect()
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._forward(reader, up_writer))
                    tasks.create_task(self._forward(up_reader, writer, is_answer=True))
            finally:
                await _close(up_writer)
        except (OSError, asyncio.CancelledError):
            pass  # the server is away, and so is the proxy; or the proxy is closed
        finally:
            self._connections.discard(connection)
            self._incomplete.discard(writer)
            await _close(writer)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(HOST, self.upstream)

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool = False
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                await self._open.wait()
                await asyncio.sleep(self._delay_s)
                if is_answer and self._loses_answers:
                    self._incomplete.add(writer)
                    continue
                writer.write(data)
                await writer.drain()
        if not (is_answer and self._loses_answers):  # a lost peer does not say goodbye
            writer.close()
        else:
            self._incomplete.add(writer)


class KubeletProxy(TcpProxy):
    """Forwards to the port in a `kubelet.json`, which may not exist yet."""

    def __init__(self, description: Path) -> None:
        super().__init__(0)
        self._description = description

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self.upstream = json.loads(self._description.read_text())["port"]
        return await super()._connect()


class SocketProxy(TcpProxy):
    """Forwards from one unix socket to another."""

    def __init__(self, path: Path, upstream: Path) -> None:
        super().__init__(0)
        self._path = path
        self._upstream = upstream

    async def start(self) -> None:
        """Listen at the path."""
        self._server = await asyncio.start_unix_server(self._serve, self._path)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(self._upstream)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
