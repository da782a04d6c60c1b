"""An API server that answers each request with the next step of a script, on a real socket.

HTTP is written by hand here, because the tests need what no library offers: half a line, a reset
in the middle of a stream, silence.
"""

import asyncio
import contextlib
import json
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from urllib.parse import parse_qsl, urlsplit

Step = Callable[["Exchange"], Awaitable[None]]
Object = dict[str, object]


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it arrived."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> object:
        return json.loads(self.body)


@dataclass(slots=True)
class Exchange:
    """One request and the means to answer it."""

    request: Request
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    broken: bool = False

    async def answer(
        self, code: int, body: object = None, headers: Mapping[str, str] | None = None
    ) -> None:
        text = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        fields = {"Content-Type": "application/json", "Content-Length": str(len(text))}
        self._head(code, {**fields, **(headers or {})})
        self.writer.write(text)
        await self.writer.drain()

    def open_stream(self) -> None:
        self._head(200, {"Content-Type": "application/json", "Transfer-Encoding": "chunked"})

    async def send(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await self.writer.drain()

    async def events(self, *events: Object) -> None:
        await self.send(b"".join(json.dumps(event).encode() + b"\n" for event in events))

    async def end(self) -> None:
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    def reset(self) -> None:
        """Break the connection with a TCP reset."""
        connection = self.writer.get_extra_info("socket")
        linger = struct.pack("ii", 1, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.transport.abort()
        self.broken = True

    def _head(self, code: int, headers: Mapping[str, str]) -> None:
        lines = [f"HTTP/1.1 {code} X", *(f"{name}: {value}" for name, value in headers.items())]
        self.writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())


class ScriptedApiserver:
    """Answers with `steps` in order, then leaves every further request without an answer.

    Reads of the store's version (a list of at most one object) are answered beside them.
    """

    def __init__(self, *steps: Step, tls: ssl.SSLContext | None = None) -> None:
        self.requests: list[Request] = []
        self.peers: set[int] = set()
        self.checks: list[Step] = []
        """Answers to the next reads of the store's version; then it is at the highest one."""
        self._steps = list(steps)
        self._tls = tls
        self._arrived = asyncio.Condition()
        self._server: asyncio.Server | None = None
        self._serving: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def open_connections(self) -> int:
        return len(self._serving)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        serving = dict(self._serving)
        for writer in serving.values():
            writer.transport.abort()
        if serving:
            await asyncio.wait(serving)
        await self._server.wait_closed()

    async def received(self, count: int) -> None:
        """Wait until `count` requests have arrived."""
        async with asyncio.timeout(30), self._arrived:
            await self._arrived.wait_for(lambda: len(self.requests) >= count)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving[task] = writer
        self.peers.add(writer.get_extra_info("peername")[1])
        try:
            while request := await _read_request(reader):
                exchange = Exchange(request, reader, writer)
                if request.query.get("limit") == "1":
                    step = self.checks.pop(0) if self.checks else lists(version=1 << 53)
                else:
                    step = self._steps.pop(0) if self._steps else hang
                    async with self._arrived:
                        self.requests.append(request)
                        self._arrived.notify_all()
                await step(exchange)
                if exchange.broken:
                    return
        except (ConnectionError, ssl.SSLError):
            return
        finally:
            del self._serving[task]
            writer.transport.abort()


async def _read_request(reader: asyncio.StreamReader) -> Request | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *rest = head.decode().rstrip().split("\r\n")
    method, target, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (x.partition(":") for x in rest)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    parts = urlsplit(target)
    return Request(method, parts.path, dict(parse_qsl(parts.query)), headers, body)


async def hang(exchange: Exchange) -> None:
    """Never answer; the client's end of the connection, or ours, ends it."""
    with contextlib.suppress(ConnectionError):
        await exchange.reader.read()


def answers(code: int, body: object = None, **headers: str) -> Step:
    """Answer once; `Retry_After="1"` becomes the header Retry-After."""

    async def step(exchange: Exchange) -> None:
        renamed = {name.replace("_", "-"): value for name, value in headers.items()}
        await exchange.answer(code, body, renamed)

    return step


def lists(*items: Object, version: int, next_page: str = "") -> Step:
    """Answer with one page of a list."""
    metadata = {"resourceVersion": str(version), **({"continue": next_page} if next_page else {})}
    return answers(200, {"kind": "List", "metadata": metadata, "items": list(items)})


def refuses(
    code: int, reason: str, message: str = "no", causes: Sequence[str] = (), **headers: str
) -> Step:
    """Answer with a Status."""
    return answers(code, status(code, reason, message, causes), **headers)


def status(code: int, reason: str, message: str = "no", causes: Sequence[str] = ()) -> Object:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
        "details": {"causes": [{"reason": cause} for cause in causes]},
    }


def streams(*chunks: bytes | Object, then: str = "end") -> Step:
    """Answer a watch with chunks (each event its own line), then end, reset or stay silent."""

    async def step(exchange: Exchange) -> None:
        exchange.open_stream()
        await exchange.writer.drain()
        for chunk in chunks:
            if isinstance(chunk, bytes):
                await exchange.send(chunk)
            else:
                await exchange.events(chunk)
        if then == "end":
            await exchange.end()
        elif then == "reset":
            exchange.reset()
        else:
            await hang(exchange)

    return step


async def resets(exchange: Exchange) -> None:
    """Break the connection instead of answering."""
    exchange.reset()


def pod(name: str, version: int, *, uid: str = "", **fields: object) -> Object:
    """Make a pod; its uid is made from its name unless given."""
    metadata = {
        "name": name,
        "namespace": "default",
        "uid": uid or f"uid-{name}",
        "resourceVersion": str(version),
    }
    return {"kind": "Pod", "apiVersion": "v1", "metadata": metadata, **fields}


def added(item: Object) -> Object:
    return {"type": "ADDED", "object": item}


def modified(item: Object) -> Object:
    return {"type": "MODIFIED", "object": item}


def deleted(item: Object) -> Object:
    return {"type": "DELETED", "object": item}


def bookmark(version: int) -> Object:
    return {
        "type": "BOOKMARK",
        "object": {
            "kind": "Pod",
            "apiVersion": "v1",
            "metadata": {"resourceVersion": str(version)},
            "spec": {"containers": None},
            "status": {},
        },
    }


def failed(code: int, reason: str, causes: Sequence[str] = ()) -> Object:
    return {"type": "ERROR", "object": status(code, reason, causes=causes)}
