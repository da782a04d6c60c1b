"""The server of the partitioner, which changes GPUs for the unprivileged agent.

It serves processes of one user, which the kernel identifies. It never changes a device's mode, and
never destroys an instance that a process uses.
"""

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import AsyncIterator, Hashable
from pathlib import Path
from weakref import WeakValueDictionary

from services.node_agent.gpus.driver import GpuDriver
from services.node_agent.gpus.inventory import Gpu
from services.node_agent.memory_limits.limit_setter import LimitSetter
from services.node_agent.mig.partitioner import Partitioner
from services.node_agent.mps.runners import MpsRunner, MpsRunners
from services.node_agent.partition.partition_protocol import (
    MAX_LINE,
    AccountingReply,
    AccountingRequest,
    CheckMpsRequest,
    ClearLimitRequest,
    DeviceRequest,
    EnsureMpsRequest,
    FailureReply,
    GetLimitRequest,
    GetMpsRequest,
    GoodReply,
    InstancesReply,
    InstancesRequest,
    LimitReply,
    LimitRequest,
    MpsDoneReply,
    MpsNodeReply,
    MpsReply,
    MpsRequest,
    ProbeMpsRequest,
    RepairMpsRequest,
    Reply,
    Request,
    SetLimitRequest,
    StopMpsRequest,
    TerminateMpsRequest,
    TimeSlicesReply,
    TimeSlicesRequest,
    decode_request,
    encode_line,
    failure_reply,
)
from services.node_agent.time_slices.slice_setter import SetTimeSlices
from shared.model.devices.device import DeviceMode
from shared.model.devices.time_slices import Interval
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.names import DeviceUuid

logger = logging.getLogger(__name__)

SOCKET_MODE = 0o600
IDLE_TIMEOUT_S = 30.0
"""An idle connection is closed after this time."""
MAX_POSITIONS = 64
_CREDENTIALS = struct.Struct("3i")


class PartitionServer:
    """A started change is finished even if the client disconnects."""

    def __init__(
        self,
        gpus: GpuDriver,
        *,
        agent_uid: int,
        limits: LimitSetter | None = None,
        mps: MpsRunners | None = None,
        set_time_slices: SetTimeSlices | None = None,
    ) -> None:
        self.gpus = gpus
        self.agent_uid = agent_uid
        self.limits = limits
        self.mps = mps
        self.set_time_slices = set_time_slices
        self._partitioner = Partitioner(gpus)
        self._locks = WeakValueDictionary[Hashable, asyncio.Lock]()
        self._running: set[asyncio.Task[GoodReply]] = set()

    @contextlib.asynccontextmanager
    async def serve(self, path: Path) -> AsyncIterator[None]:
        await asyncio.to_thread(path.parent.mkdir, parents=True, exist_ok=True)
        server = await asyncio.start_unix_server(self._handle_connection, path, limit=MAX_LINE)
        await asyncio.to_thread(path.chmod, SOCKET_MODE)
        logger.info("serving user %d on %s", self.agent_uid, path)
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
            while line := await asyncio.wait_for(reader.readline(), IDLE_TIMEOUT_S):
                reply = (
                    await self.reply_to(line, pid)
                    if uid == self.agent_uid
                    else self._refuse(pid, uid)
                )
                writer.write(encode_line(reply))
                await writer.drain()
        except (OSError, TimeoutError, ValueError) as error:
            logger.info("a connection ended: %r", error)
        finally:
            writer.close()

    def _refuse(self, pid: int, uid: int) -> FailureReply:
        logger.warning("process %d of user %d is rejected", pid, uid)
        return failure_reply(
            UnavailableError(f"the partitioner serves user {self.agent_uid}, not {uid}")
        )

    async def reply_to(self, line: bytes, pid: int) -> Reply:
        try:
            request = decode_request(line)
            if isinstance(request, InstancesRequest) and not request.after_changes:
                gpu = await self._gpu(request.device)
                return InstancesReply(gpu.mig, gpu.instances)
            task = asyncio.create_task(self._reply_in_order(request, pid))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            return await asyncio.shield(task)
        except LeaseholdError as error:
            logger.info("%s: %s", type(error).__name__, error)
            return failure_reply(error)

    async def _reply_in_order(self, request: Request, pid: int) -> GoodReply:
        if isinstance(request, MpsRequest):
            return await self._reply_on_mps(request)
        async with self._locks.setdefault(_order_of(request), asyncio.Lock()):
            if not isinstance(request, DeviceRequest):
                return await self._reply_on_limit(request, pid)
            gpu = await self._gpu(request.device)
            if isinstance(request, InstancesRequest):
                return InstancesReply(gpu.mig, await self.gpus.instances(gpu.uuid))
            if isinstance(request, TimeSlicesRequest):
                return await self._set_time_slices(gpu, request.interval)
            _check_request(gpu, len(request.layout.positions))
            instances = await self._partitioner.partition(
                gpu.uuid,
                request.layout,
                gpu.mig.profiles if gpu.mig is not None else (),
                request.in_use,
            )
            return InstancesReply(gpu.mig, instances)

    async def _set_time_slices(self, gpu: Gpu, interval: Interval) -> TimeSlicesReply:
        if self.set_time_slices is None:
            raise RequestError("this partitioner sets no time slices")
        if gpu.mode is DeviceMode.MIG:
            raise RequestError(
                f"device {gpu.uuid} is in MIG mode: its instances have no time slices to set"
            )
        await self.set_time_slices(gpu.uuid, interval)
        return TimeSlicesReply()

    async def _reply_on_limit(self, request: LimitRequest, pid: int) -> GoodReply:
        limits = self.limits
        if limits is None:
            raise RequestError("this partitioner sets no limits of memory")
        match request:
            case AccountingRequest(device):
                return AccountingReply(await limits.accounting(device, agent_pid=pid))
            case GetLimitRequest(target):
                return LimitReply(await limits.get(target))
            case SetLimitRequest(target, fence, memory_bytes):
                limit = await limits.set(target, fence=fence, memory_bytes=memory_bytes)
                return LimitReply(limit)
            case ClearLimitRequest(target, fence):
                return LimitReply(await limits.clear(target, fence=fence))

    async def _reply_on_mps(self, request: MpsRequest) -> GoodReply:
        mps = self._runner_for(request)
        match request:
            case CheckMpsRequest():
                return MpsNodeReply(await mps.missing_reason(), await mps.list())
            case EnsureMpsRequest(target, fence, limits):
                return MpsReply(await mps.ensure(target, fence=fence, limits=limits))
            case GetMpsRequest(target):
                return MpsReply(await mps.get(target))
            case TerminateMpsRequest(target, clients):
                await mps.terminate(target, clients)
            case ProbeMpsRequest(target):
                await mps.probe(target)
            case RepairMpsRequest(target):
                return MpsDoneReply(await mps.repair(target))
            case StopMpsRequest(target, fence):
                await mps.stop(target, fence=fence)
        return MpsDoneReply()

    def _runner_for(self, request: MpsRequest) -> MpsRunner:
        if self.mps is None:
            raise RequestError(
                "this partitioner starts no daemons of MPS: set its --mps-dir to the directory mps "
                "of the agent's state directory"
            )
        if isinstance(request, CheckMpsRequest):
            return self.mps.shared if request.shared else self.mps.private
        return self.mps.shared if request.target.gpu else self.mps.private

    async def _gpu(self, device: DeviceUuid) -> Gpu:
        gpus = {gpu.uuid: gpu for gpu in await self.gpus.discover()}
        if device not in gpus:
            raise RequestError(f"device {device} is not on this node")
        return gpus[device]


def _order_of(request: DeviceRequest | LimitRequest) -> Hashable:
    """A container that starts does not wait until the limits of all other cgroups are listed."""
    match request:
        case SetLimitRequest(target) | GetLimitRequest(target) | ClearLimitRequest(target):
            return target.device, target.pod
        case AccountingRequest(device):
            return device, "accounting"
        case _:
            return request.device


def _check_request(gpu: Gpu, positions: int) -> None:
    if gpu.mode is not DeviceMode.MIG:
        raise RequestError(f"device {gpu.uuid} is not in MIG mode, which only an operator changes")
    if not 0 < positions <= MAX_POSITIONS:
        raise RequestError(f"a layout cannot have {positions} instances")


def _peer_credentials(writer: asyncio.StreamWriter) -> tuple[int, int]:
    connection = writer.get_extra_info("socket")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    return pid, uid
