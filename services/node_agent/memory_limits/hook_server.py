"""Serves the hook of container runtimes, for containers that are about to start.

What the hook says is compared with the kernel and the lease before a limit is set.
"""

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec

from shared.model.bounds import cut
from shared.model.errors import UNDECODABLE, LeaseholdError, RequestError
from shared.model.names import PodUid

logger = logging.getLogger(__name__)

REPLY_S = 4.5
"""The hook gives up after 5 s."""
MOST_BYTES = 1 << 20
MOST_CALLS = 64
_CREDENTIALS = struct.Struct("3i")


class ContainerState(msgspec.Struct, frozen=True):
    """https://github.com/opencontainers/runtime-spec/blob/main/runtime.md#state."""

    id: str
    pid: int
    bundle: str = ""


class HookCall(msgspec.Struct, frozen=True):
    holder: PodUid
    """The pod, or the ResourceClaim."""
    container: str
    """Or the claim's request."""
    fence: int
    state: ContainerState


_decode = msgspec.json.Decoder(ContainerState).decode


def parse_call(data: bytes) -> HookCall:
    """Read `HOLDER CONTAINER FENCE`, a line feed and the state. Raises RequestError."""
    head, _, state = data.partition(b"\n")
    try:
        holder, container, fence = head.decode().split(" ")
        return HookCall(PodUid(holder), container, int(fence), _decode(state))
    except (ValueError, *UNDECODABLE) as error:
        raise RequestError(f"the hook's call is invalid: {error}") from error


class HookServer:
    def __init__(self, path: Path, start: Callable[[HookCall], Awaitable[None]]) -> None:
        self.path = path
        self.start = start
        self._calls = asyncio.Semaphore(MOST_CALLS)

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        await asyncio.to_thread(self.path.unlink, missing_ok=True)
        server = await asyncio.start_unix_server(self._handle, self.path)
        await asyncio.to_thread(self.path.chmod, 0o600)
        try:
            yield
        finally:
            server.close()
            await asyncio.to_thread(self.path.unlink, missing_ok=True)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REPLY_S), self._calls:
                writer.write(f"{await self._reply(reader, writer)}\n".encode())
                await writer.drain()
        except (OSError, TimeoutError) as error:
            logger.warning("a container does not start: its hook has no reply: %r", error)
        finally:
            writer.close()

    async def _reply(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        uid = _peer_uid(writer)
        if uid not in (0, os.geteuid()):
            return f"user {uid} is not served"
        try:
            await self.start(parse_call(await _read(reader)))
        except LeaseholdError as error:
            return cut(" ".join(str(error).split()))
        return "ok"


async def _read(reader: asyncio.StreamReader) -> bytes:
    data = b""
    while part := await reader.read(MOST_BYTES):
        data += part
        if len(data) > MOST_BYTES:
            raise RequestError(f"the hook's call has more than {MOST_BYTES} bytes")
    return data


def _peer_uid(writer: asyncio.StreamWriter) -> int:
    connection = writer.get_extra_info("socket")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(credentials)[1]
    return uid
