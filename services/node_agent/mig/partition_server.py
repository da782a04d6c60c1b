"""The partitioner: changes MIG layouts for the node's agent, which itself has no right to.

It listens on a unix socket, talks to processes of one user only (the kernel says who they are), and
trusts nothing it is told: that the device is there and in MIG mode, which instances the hardware
knows, and which are in use it asks the driver itself. It never changes a device's mode and never
removes an instance that a process uses, whatever it is asked.
"""

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path

from services.node_agent.gpus.driver import GpuDriver
from services.node_agent.gpus.inventory import Gpu
from services.node_agent.mig.partition_protocol import (
    MAX_LINE,
    FailureReply,
    InstancesReply,
    InstancesRequest,
    PartitionRequest,
    decode_request,
    encode_line,
    failure_reply,
)
from services.node_agent.mig.partitioner import Partitioner
from shared.model.device import DeviceMode
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.names import DeviceUuid

logger = logging.getLogger(__name__)

SOCKET_MODE = 0o600
IDLE_TIMEOUT_S = 30.0
"""A connection that says nothing for so long is closed."""
MAX_POSITIONS = 64
"""No device has as many instances."""
_CREDENTIALS = struct.Struct("3i")


class PartitionServer:
    """Serves one agent; a change that was begun is finished, also if nobody waits for it."""

    def __init__(self, gpus: GpuDriver, *, agent_uid: int) -> None:
        self.gpus = gpus
        self.uid = agent_uid
        self._partitioner = Partitioner(gpus)
        self._locks: dict[DeviceUuid, asyncio.Lock] = {}
        self._running: set[asyncio.Task[InstancesReply]] = set()

    @contextlib.asynccontextmanager
    async def serve(self, path: Path) -> AsyncIterator[None]:
        """Listen on a socket that only its owner may use."""
        await asyncio.to_thread(path.parent.mkdir, parents=True, exist_ok=True)
        server = await asyncio.start_unix_server(self._handle_connection, path, limit=MAX_LINE)
        await asyncio.to_thread(path.chmod, SOCKET_MODE)
        logger.info("partitioning is done for user %d through %s", self.uid, path)
        try:
            yield
        finally:
            server.close()
            if self._running:
                await asyncio.wait(self._running)
            await asyncio.to_thread(path.unlink, missing_ok=True)

    async def _handle_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            pid, uid = _peer_credentials(writer)
            while line := await _read_line(reader):
                told = await self._reply(line) if uid == self.uid else self._refuse(pid, uid)
                writer.write(encode_line(told))
                await writer.drain()
        except (OSError, TimeoutError, ValueError) as error:
            logger.info("a connection ended: %r", error)
        finally:
            writer.close()

    def _refuse(self, pid: int, uid: int) -> FailureReply:
        logger.warning("process %d of user %d is not talked to", pid, uid)
        return failure_reply(
            UnavailableError(f"the partitioner talks to user {self.uid}, not to {uid}")
        )

    async def _reply(self, line: bytes) -> InstancesReply | FailureReply:
        try:
            asked = decode_request(line)
            gpu = await self._gpu(asked.device)
            if isinstance(asked, InstancesRequest):
                return InstancesReply(gpu.mig, gpu.instances)
            _check_request(gpu, len(asked.layout.positions))
            task = asyncio.create_task(self._partition(gpu, asked))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            return await asyncio.shield(task)
        except LeaseholdError as error:
            logger.info("%s: %s", type(error).__name__, error)
            return failure_reply(error)

    async def _partition(self, gpu: Gpu, asked: PartitionRequest) -> InstancesReply:
        profiles = gpu.mig.profiles if gpu.mig is not None else ()
        async with self._locks.setdefault(gpu.uuid, asyncio.Lock()):
            there = await self._partitioner.partition(gpu.uuid, asked.layout, profiles, asked.held)
        return InstancesReply(gpu.mig, there)

    async def _gpu(self, device: DeviceUuid) -> Gpu:
        found = {gpu.uuid: gpu for gpu in await self.gpus.discover()}
        if device not in found:
            raise RequestError(f"device {device} is not here")
        return found[device]


def _check_request(gpu: Gpu, positions: int) -> None:
    """Raise RequestError for what no agent of ours asks."""
    if gpu.mode is not DeviceMode.MIG:
        raise RequestError(f"device {gpu.uuid} is not in MIG mode, which only an operator changes")
    if not 0 < positions <= MAX_POSITIONS:
        raise RequestError(f"a layout of {positions} instances is none")


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(IDLE_TIMEOUT_S):
        return await reader.readline()


def _peer_credentials(writer: asyncio.StreamWriter) -> tuple[int, int]:
    """Return process and user at the other end, as the kernel has them."""
    connection = writer.get_extra_info("socket")
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(told)
    return pid, uid
