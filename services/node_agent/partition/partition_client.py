"""The agent's client of the partitioner: lists and changes MIG instances.

While the partitioner is unreachable, its latest reply applies.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from services.node_agent.gpus.device_faults import Xid
from services.node_agent.gpus.driver import GpuDriver
from services.node_agent.gpus.inventory import Gpu
from services.node_agent.mig.instances import InstanceProfile, MigInstance
from services.node_agent.partition.partition_protocol import (
    MAX_LINE,
    InstancesReply,
    InstancesRequest,
    PartitionRequest,
    R,
    Request,
    decode_reply,
    encode_line,
)
from shared.model.devices.device import DeviceMode, MigLayout, UnreadDevice
from shared.model.errors import LeaseholdError, UnavailableError
from shared.model.names import DeviceUuid

logger = logging.getLogger(__name__)

READ_TIMEOUT_S = 10.0
"""Time limit of reading the instances of a device."""
PARTITION_TIMEOUT_S = 120.0
"""Longer than the driver's limit for all steps of a layout; callers have limits of their own."""


class RemotePartitioner:
    def __init__(self, gpus: GpuDriver, socket: Path) -> None:
        self.gpus = gpus
        self.socket = socket
        self._known: dict[DeviceUuid, InstancesReply] = {}
        self._last_error = ""

    async def discover(self) -> tuple[Gpu, ...]:
        gpus = await self.gpus.discover()
        return tuple(await asyncio.gather(*(self._with_mig_state(gpu) for gpu in gpus)))

    @property
    def unreadable(self) -> Mapping[int, str]:
        return self.gpus.unreadable

    @property
    def unread(self) -> tuple[UnreadDevice, ...]:
        return self.gpus.unread

    def xids(self) -> tuple[Xid, ...]:
        return self.gpus.xids()

    async def read_device(self, device: DeviceUuid) -> InstancesReply:
        return await self._request(InstancesRequest(device), READ_TIMEOUT_S)

    async def instances(self, device: DeviceUuid) -> tuple[MigInstance, ...]:
        """An instance that a change still destroys must not be given to a container."""
        request = InstancesRequest(device, after_changes=True)
        return (await self._request(request, PARTITION_TIMEOUT_S)).instances

    async def partition(
        self,
        device: DeviceUuid,
        layout: MigLayout,
        profiles: Sequence[InstanceProfile],
        in_use: Collection[str],
    ) -> tuple[MigInstance, ...]:
        request = PartitionRequest(device, layout, tuple(sorted(in_use)))
        return (await self._request(request, PARTITION_TIMEOUT_S)).instances

    async def _request(
        self, request: InstancesRequest | PartitionRequest, limit_s: float
    ) -> InstancesReply:
        return await exchange(self.socket, request, InstancesReply, limit_s)

    async def _with_mig_state(self, gpu: Gpu) -> Gpu:
        if gpu.mode is not DeviceMode.MIG or gpu.fault is not None:
            return gpu
        try:
            self._known[gpu.uuid] = await self.read_device(gpu.uuid)
            self._last_error = ""
        except LeaseholdError as error:
            if str(error) != self._last_error:
                logger.warning("MIG instances may be outdated: %s", error)
            self._last_error = str(error)
        seen = self._known.get(gpu.uuid)
        return gpu if seen is None else replace(gpu, mig=seen.state, instances=seen.instances)


async def exchange(socket: Path, request: Request, reply_type: type[R], limit_s: float) -> R:
    """Raises the error that the partitioner replies with, or UnavailableError without a reply."""
    try:
        async with asyncio.timeout(limit_s):
            reader, writer = await asyncio.open_unix_connection(socket, limit=MAX_LINE)
            try:
                writer.write(encode_line(request))
                await writer.drain()
                line = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError) as error:
        raise UnavailableError(
            f"no partitioner responds at {socket} ({error!r}): is its container running?"
        ) from error
    return decode_reply(line, reply_type)
