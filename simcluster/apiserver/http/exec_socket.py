"""pods/exec and pods/attach over WebSocket: `v5.channel.k8s.io` and `v4.channel.k8s.io`.

Each binary message begins with its channel: 0 stdin, 1 stdout, 2 stderr, 3 the final Status,
4 terminal sizes, and in v5 255 closes the channel named by the next byte.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping

import msgspec
from aiohttp import WSMsgType, web

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import Json, encode, metadata
from simcluster.apiserver.http.pod_access import NO_RUNTIME, resolve_container
from simcluster.apiserver.requests.query_parameters import is_set
from simcluster.ports import ContainerRuntime

log = logging.getLogger(__name__)

V5 = "v5.channel.k8s.io"
V4 = "v4.channel.k8s.io"
_STDIN = 0
_STDOUT = 1
_STDERR = 2
_STATUS = 3
_SIZE = 4
_CLOSE = 255
_CHUNK_BYTES = 32 * 1024
_PENDING_CHUNKS = 64


class WebSocketStreams:
    """The session's channels, as `ExecStreams`; output that was not requested is dropped."""

    def __init__(self, socket: web.WebSocketResponse, query: Mapping[str, str]) -> None:
        self.size: tuple[int, int] | None = None
        self._socket = socket
        self._input: asyncio.Queue[bytes] = asyncio.Queue(_PENDING_CHUNKS)
        self._ended = not is_set(query, "stdin")
        self._wanted = {
            _STDOUT: is_set(query, "stdout"),
            _STDERR: is_set(query, "stderr") and not is_set(query, "tty"),
        }

    async def read_stdin(self) -> bytes:
        """Wait for input; empty bytes at its end, also on further calls."""
        if self._ended and self._input.empty():
            return b""
        data = await self._input.get()
        self._ended = self._ended or not data
        return data

    async def write_stdout(self, data: bytes) -> None:
        """Send output."""
        await self._send(_STDOUT, data)

    async def write_stderr(self, data: bytes) -> None:
        """Send errors."""
        await self._send(_STDERR, data)

    async def _send(self, channel: int, data: bytes) -> None:
        if self._wanted[channel]:
            for at in range(0, len(data), _CHUNK_BYTES):
                await self._socket.send_bytes(bytes([channel]) + data[at : at + _CHUNK_BYTES])

    async def receive(self) -> None:
        """Read messages from the socket until the client disconnects."""
        async for message in self._socket:
            if message.type is not WSMsgType.BINARY or not message.data:
                continue
            channel = message.data[0]
            data = message.data[1:]
            if channel == _STDIN and data:
                await self._input.put(data)
            elif channel == _SIZE:
                self._resize(data)
            elif channel == _CLOSE and data[:1] == bytes([_STDIN]):
                await self._input.put(b"")

    def _resize(self, data: bytes) -> None:
        with contextlib.suppress(msgspec.MsgspecError):
            size = msgspec.json.decode(data, type=TerminalSize)
            self.size = size.Width, size.Height


class TerminalSize(msgspec.Struct):
    """A message on the channel of terminal sizes."""

    Width: int
    Height: int


def exec_options(request: web.BaseRequest) -> Json:
    """Return a session's query as the options for admission, without their kind."""
    query = request.query
    flags = {name: True for name in ("stdin", "stdout", "stderr", "tty") if is_set(query, name)}
    container = query.get("container", "")
    named = {"container": container} if container else {}
    command = query.getall("command", [])
    return {**named, **flags, **({"command": command} if command else {})}


async def serve_exec(
    request: web.BaseRequest, runtime: ContainerRuntime | None, pod: Json, *, attach: bool = False
) -> web.StreamResponse:
    """Run a command in a container, or attach to its own; early errors are plain responses."""
    query = request.query
    container = resolve_container(pod, query.get("container", ""))
    command = query.getall("command", [])
    if not (command or attach):
        raise ApiError.bad_request("you must specify at least 1 command for the container")
    if runtime is None:
        raise NO_RUNTIME
    protocol = _protocol(request)
    socket = web.WebSocketResponse(protocols=(protocol,), autoping=True, compress=False)
    await socket.prepare(request)
    streams = WebSocketStreams(socket, query)
    tty = is_set(query, "tty")
    try:
        async with asyncio.TaskGroup() as tasks:
            receiving = tasks.create_task(streams.receive())
            running = tasks.create_task(
                _run(runtime, pod, container, command, tty=tty, streams=streams)
            )
            await asyncio.wait({receiving, running}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                await socket.send_bytes(bytes([_STATUS]) + encode(running.result()))
            running.cancel()
            receiving.cancel()
    except* ConnectionError:
        log.debug("the client of an exec session disconnected")
    await socket.close()
    return socket


async def _run(
    runtime: ContainerRuntime,
    pod: Json,
    container: str,
    command: list[str],
    *,
    tty: bool,
    streams: WebSocketStreams,
) -> Json:
    where = metadata(pod)["namespace"], metadata(pod)["name"], container
    try:
        if command:
            code = await runtime.exec(*where, command, tty=tty, streams=streams)
        else:
            code = 0
            await runtime.attach(*where, streams)
    except ApiError as error:
        return error.status()
    return exit_status(code)


def exit_status(code: int) -> Json:
    """Return the Status that carries a command's exit code."""
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    return {
        "metadata": {},
        "status": "Failure",
        "message": f"command terminated with non-zero exit code: exit status {code}",
        "reason": "NonZeroExitCode",
        "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
    }


def _protocol(request: web.BaseRequest) -> str:
    upgrade = request.headers.get("Upgrade", "").lower()
    if upgrade.startswith("spdy"):
        raise ApiError.bad_request(
            f"this API server supports {V5} and {V4} over WebSocket, not {upgrade.upper()}; "
            "use kubectl 1.31 or newer"
        )
    if upgrade != "websocket":
        raise ApiError.bad_request("Upgrade request required")
    offered = request.headers.get("Sec-WebSocket-Protocol", "").replace(" ", "").split(",")
    for protocol in (V5, V4):
        if protocol in offered:
            return protocol
    raise ApiError.bad_request(f"no protocol in common: {offered} offered, {V5} and {V4} served")
