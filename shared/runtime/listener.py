"""The HTTP listener of all ports: what a peer can use of it is bounded before the peer is known.

Bodies with a `Content-Encoding` are refused: what they unpack to has no bound.
"""

import asyncio
import collections
import contextlib
import logging
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from http import HTTPStatus
from typing import Any, cast

from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import Counter

from shared.credentials.turns import Turns
from shared.model.clock import in_background
from shared.model.errors import RequestError
from shared.nats.limited_log import LimitedLog
from shared.runtime.bodies import ARRIVED, BODY, SlowBodyError, read_body
from shared.runtime.connections import ConnectionState, PortBounds, Progress, to_close

logger = logging.getLogger(__name__)
_limited = LimitedLog(logger)

CLOSED = Counter(
    "leasehold_http_connections_closed",
    "Connections that were closed because of a bound: full (for another one), refused (no other "
    "may be closed), late (no request arrived), stalled (a response was not taken).",
    ["reason"],
)
CERTIFICATES_REFUSED = Counter(
    "leasehold_http_certificates_refused",
    "TLS handshakes that ended because the client's certificate is missing or not accepted.",
)
BOUNDS: web.AppKey[PortBounds] = web.AppKey("bounds", PortBounds)
BACKLOG = 1024
SWEEP_S = 1.0
"""The interval of looks for connections that have to be closed."""
MOST_WAITING = 64
"""While all connections are busy, at most half of them from one address."""
PAUSE_S = 0.02
"""The pause until the next look for room for a waiting connection."""
SPARE_FILES = 256
"""Beside the connections of a port."""
READ_BUFFER_BYTES = 16 * 1024
SHUTDOWN_S = 1.0
"""How long connections may take to end before they are closed."""
Tls = Callable[[], ssl.SSLContext]
BodyTime = Callable[[web.Request], float]
"""Returns seconds."""
Late = Callable[[web.Request, bytes], web.StreamResponse]
"""Returns the response from the part of a body that has arrived."""


class _Connection(asyncio.Protocol):
    def __init__(self, state: ConnectionState, handler: asyncio.Protocol) -> None:
        self.state = state
        self.handler = handler
        self.context: ssl.SSLContext | None = None
        self.opening: asyncio.Task[None] | None = None
        self.transport: asyncio.Transport | None = None
        self.lost = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # those of uvloop are of no such type
        self.handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self.handler.data_received(data)

    def eof_received(self) -> bool | None:
        return self.handler.eof_received()

    def pause_writing(self) -> None:
        self.handler.pause_writing()

    def resume_writing(self) -> None:
        self.handler.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.handler.connection_lost(exc)
        if not self.lost.done():
            self.lost.set_result(None)

    def abort(self) -> None:
        if self.opening is not None:
            self.opening.cancel()
        if self.transport is not None:
            self.transport.abort()


class Listener:
    def __init__(
        self, bounds: PortBounds, *, tls: Tls | None, body_time: BodyTime | None, late: Late | None
    ) -> None:
        self.bounds = bounds
        self.tls = tls
        self.body_time = body_time or (lambda _: bounds.body_s)
        self.late = late or _late
        self._large = Turns(bounds.larger_bodies)
        self._connections: dict[asyncio.Protocol, _Connection] = {}
        self._of_address: collections.Counter[str] = collections.Counter()
        self._waiting: list[tuple[socket.socket, str, web.Server]] = []
        self._waits = asyncio.Event()
        """A listener without waiting connections leaves the processor alone."""

    @web.middleware
    async def limit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """It runs after the application's own middlewares, which know callers and write errors."""
        connection = self._connections.get(request.protocol)
        if connection is None:
            raise web.HTTPServiceUnavailable  # nobody receives it: the connection was closed
        state = connection.state
        now = asyncio.get_running_loop().time
        request[ARRIVED] = now()
        state.advance(state.progress, request[ARRIVED])
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise web.HTTPUnsupportedMediaType(reason="no Content-Encoding is accepted")
        most = self.bounds.body_bytes
        size = most if request.content_length is None else request.content_length
        if request.body_exists and size > most:
            raise web.HTTPRequestEntityTooLarge(max_size=most, actual_size=size)
        async with contextlib.AsyncExitStack() as turn:
            try:
                request[BODY] = await self._read(request, size, turn)
            except SlowBodyError as error:
                return self.late(request, error.head)
            progress = state.progress
            state.advance(Progress.BUSY, now())
            try:
                response = await handler(request)
                if response.status < HTTPStatus.BAD_REQUEST:
                    progress = Progress.PROVEN
            finally:
                state.advance(progress, now())
        if self.tls is not None and connection.context is not self.tls():
            response.force_close()  # certificates or authorities have changed since it was opened
        return response

    async def _read(
        self, request: web.Request, size: int, turn: contextlib.AsyncExitStack
    ) -> bytes:
        if not request.body_exists:
            return b""
        limit_s = min(self.bounds.body_s, self.body_time(request))
        deadline = request[ARRIVED] + limit_s
        is_large = size > self.bounds.free_body_bytes
        if is_large:
            try:
                async with asyncio.timeout_at(deadline):
                    owner = request.remote or ""
                    await turn.enter_async_context(self._large.turn(owner, size))
            except TimeoutError as error:
                raise SlowBodyError(request.content.read_nowait(READ_BUFFER_BYTES)) from error
        return await read_body(
            request, most=self.bounds.body_bytes, deadline=deadline, has_turn=is_large
        )

    async def accept(self, listening: socket.socket, server: web.Server) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, peer = await loop.sock_accept(listening)
            except OSError as error:  # the client has gone, or no file is left
                logger.debug("a connection was not accepted: %s", error)
                self._make_room(self._connections.values())
                await asyncio.sleep(PAUSE_S)
                continue
            address = str(peer[0])
            if self._has_room(address):
                self._open(accepted, address, server)
            elif sum(address == other for _, other, _ in self._waiting) < MOST_WAITING // 2:
                self._waiting.append((accepted, address, server))
                self._waits.set()
            else:
                CLOSED.labels("refused").inc()
                accepted.close()
            while len(self._waiting) >= MOST_WAITING:  # noqa: ASYNC110 - `open_waiting` looks
                await asyncio.sleep(PAUSE_S)
            await asyncio.sleep(0)  # those that are open come first

    async def open_waiting(self) -> None:
        while True:
            if not self._waiting:
                self._waits.clear()
                await self._waits.wait()
            await asyncio.sleep(PAUSE_S)
            full: set[str] = set()
            waiting, self._waiting = self._waiting, []
            for accepted, address, server in waiting:
                if address not in full and self._has_room(address):
                    self._open(accepted, address, server)
                else:
                    full.add(address)
                    self._waiting.append((accepted, address, server))

    def _has_room(self, address: str) -> bool:
        if self._of_address[address] >= self.bounds.of_address:
            own = [
                connection
                for connection in self._connections.values()
                if connection.state.address == address
            ]
            return self._make_room(own)
        if len(self._connections) >= self.bounds.connections:
            return self._make_room(self._connections.values())
        return True

    def _make_room(self, connections: Iterable[_Connection]) -> bool:
        by_state = {connection.state: connection for connection in connections}
        state = to_close(by_state, asyncio.get_running_loop().time())
        if state is None:
            return False
        self._close(by_state[state], "full")
        return True

    def _open(self, accepted: socket.socket, address: str, server: web.Server) -> None:
        progress = Progress.OPEN if self.tls is None else Progress.ACCEPTED
        state = ConnectionState(address, progress, asyncio.get_running_loop().time())
        connection = _Connection(state, server())
        self._connections[connection.handler] = connection
        self._of_address[address] += 1
        connection.opening = asyncio.create_task(self._shake_hands(connection, accepted))
        connection.lost.add_done_callback(lambda _: self._forget(connection))

    async def _shake_hands(self, connection: _Connection, accepted: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        tls: dict[str, Any] = {}
        if self.tls is not None:
            connection.context = self.tls()
            tls = {
                "ssl": connection.context,
                "ssl_handshake_timeout": self.bounds.handshake_s,
                "ssl_shutdown_timeout": SHUTDOWN_S,
            }
        try:
            await loop.connect_accepted_socket(lambda: connection, accepted, **tls)
            if connection.state.progress is Progress.ACCEPTED:
                connection.state.advance(Progress.OPEN, loop.time())
        except OSError as error:  # ssl.SSLError is one
            address = connection.state.address
            refusal = _refusal(error)
            if refusal:
                CERTIFICATES_REFUSED.inc()
                text = f"a caller at {address} was refused in the TLS handshake: {refusal}"
                _limited.write(logging.WARNING, f"{refusal} {address}", text)
            logger.debug("no connection from %s: %s", address, error)
        finally:
            connection.opening = None
            if connection.transport is None:
                self._forget(connection)
                accepted.close()

    def _close(self, connection: _Connection, reason: str) -> None:
        CLOSED.labels(reason).inc()
        self._forget(connection)
        connection.abort()

    def _forget(self, connection: _Connection) -> None:
        if self._connections.pop(connection.handler, None) is not None:
            address = connection.state.address
            self._of_address[address] -= 1
            if not self._of_address[address]:
                del self._of_address[address]

    async def sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now = asyncio.get_running_loop().time()
            for connection in [*self._connections.values()]:
                transport = connection.transport
                state = connection.state
                if transport is not None:
                    # One that ends TLS has a time limit of its own, and asyncio's no size any more.
                    is_ending = self.tls is not None and transport.is_closing()
                    unsent = 0 if is_ending else transport.get_write_buffer_size()
                    state.note_unsent(unsent, now)
                if state.has_stalled(now):
                    self._close(connection, "stalled")
                elif state.is_late(self.bounds, now):
                    self._close(connection, "late")

    def close(self) -> None:
        for accepted, _, _ in self._waiting:
            accepted.close()
        for connection in [*self._connections.values()]:
            self._forget(connection)
            connection.abort()


def _refusal(error: OSError) -> str:
    """Return what is wrong with a client's certificate, or "" for another error."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it has presented no certificate"
    return ""


def _late(_: web.Request, __: bytes) -> web.StreamResponse:
    raise web.HTTPRequestTimeout(reason="the body did not arrive in time")


@contextlib.asynccontextmanager
async def listening(
    pages: web.Application,
    address: str,
    *,
    flag: str,
    tls: Tls | None = None,
    body_time: BodyTime | None = None,
    late: Late | None = None,
    shutdown_s: float = SHUTDOWN_S,
) -> AsyncIterator[tuple[str, int]]:
    """Serve an application on `HOST:PORT` (port 0: any free port) within its `BOUNDS`.

    Raises RequestError, which names the flag, if the address is invalid or in use.
    """
    sockets = await _bind(address, flag)
    bounds = _within_files(pages.get(BOUNDS, PortBounds()))
    listener = Listener(bounds, tls=tls, body_time=body_time, late=late)
    pages.middlewares.append(listener.limit)
    runner = web.AppRunner(
        pages,
        access_log=None,
        shutdown_timeout=shutdown_s,
        keepalive_timeout=bounds.idle_s,
        lingering_time=SHUTDOWN_S,
        read_bufsize=READ_BUFFER_BYTES,
        auto_decompress=False,
    )
    try:
        async with contextlib.AsyncExitStack() as stack:
            await runner.setup()
            assert runner.server is not None  # noqa: S101 - it is set up
            work = [listener.accept(bound, runner.server) for bound in sockets]
            for task in (*work, listener.sweep(), listener.open_waiting()):
                await stack.enter_async_context(in_background(task))
            host, port = sockets[0].getsockname()[:2]
            yield str(host), int(port)
    finally:
        for listening_socket in sockets:
            listening_socket.close()
        await runner.cleanup()
        listener.close()


async def _bind(address: str, flag: str) -> list[socket.socket]:
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise RequestError(f"{flag} {address!r} is not HOST:PORT")
    loop = asyncio.get_running_loop()
    sockets: list[socket.socket] = []
    try:
        addresses = await loop.getaddrinfo(
            host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, target in dict.fromkeys((address[0], address[4]) for address in addresses):
            made = socket.create_server(
                target[:2], family=family, backlog=BACKLOG, reuse_port=False
            )
            made.setblocking(False)
            sockets.append(made)
    except OSError as error:
        for made in sockets:
            made.close()
        raise RequestError(f"{flag} {address}: {error.strerror}; choose a free port") from error
    return sockets


def _within_files(bounds: PortBounds) -> PortBounds:
    """Let the process open as many files as the connections need, or return lower bounds."""
    needed = bounds.connections + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return bounds
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == needed:
        return bounds
    logger.warning("%d open files are allowed, and %d are needed: see ulimit -n", allowed, needed)
    return replace(bounds, connections=max(allowed // 2, 1))
