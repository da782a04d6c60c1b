"""The agent's side of the partitioner: lists and changes MIG instances without rights of its own.

What the driver tells the agent of a device in MIG mode is little without those rights; the rest
comes from the partitioner, and what it said last holds while it is away.
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
from services.node_agent.mig.partition_protocol import (
    MAX_LINE,
    InstancesReply,
    InstancesRequest,
    PartitionRequest,
    decode_reply,
    encode_line,
)
from shared.model.device import DeviceMode, MigLayout
from shared.model.errors import LeaseholdError, UnavailableError
from shared.model.names import DeviceUuid

logger = logging.getLogger(__name__)

READ_TIMEOUT_S = 10.0
PARTITION_TIMEOUT_S = 120.0
"""Longer than the driver is given for all steps of a layout; who asks has his own patience."""


class RemotePartitioner:
    """The partitioner behind a socket; a connection for each question."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket

    async def read_device(self, device: DeviceUuid) -> InstancesReply:
        """Return what a device has. Raises UnavailableError while the partitioner is away."""
        return await self._request(InstancesRequest(device), READ_TIMEOUT_S)

    async def instances(self, device: DeviceUuid) -> tuple[MigInstance, ...]:
        """Return the instances of a device in MIG mode."""
        return (await self.read_device(device)).instances

    async def partition(
        self,
        device: DeviceUuid,
        layout: MigLayout,
        profiles: Sequence[InstanceProfile],
        held: Collection[str],
    ) -> tuple[MigInstance, ...]:
        """Give the device this layout; see `Partitioner.partition`, which does it over there."""
        asked = PartitionRequest(device, layout, tuple(sorted(held)))
        return (await self._request(asked, PARTITION_TIMEOUT_S)).instances

    async def _request(
        self, asked: InstancesRequest | PartitionRequest, limit_s: float
    ) -> InstancesReply:
        try:
            async with asyncio.timeout(limit_s):
                reader, writer = await asyncio.open_unix_connection(self.socket, limit=MAX_LINE)
                try:
                    writer.write(encode_line(asked))
                    await writer.drain()
                    line = await reader.readline()
                finally:
                    writer.close()
        except (OSError, TimeoutError, ValueError) as error:
            raise UnavailableError(
                f"no partitioner answers at {self.socket} ({error!r}): does its container run?"
            ) from error
        return decode_reply(line)


class RemoteMigGpus:
    """The node's GPUs, with what the partitioner knows of those in MIG mode."""

    def __init__(self, gpus: GpuDriver, remote: RemotePartitioner) -> None:
        self.gpus = gpus
        self.remote = remote
        self._known: dict[DeviceUuid, InstancesReply] = {}
        self._last_error = ""

    async def discover(self) -> tuple[Gpu, ...]:
        """Return all GPUs; UnavailableError while the driver cannot be asked."""
        found = await self.gpus.discover()
        return tuple(await asyncio.gather(*(self._with_mig_state(gpu) for gpu in found)))

    @property
    def unreadable(self) -> Mapping[int, str]:
        """Why GPUs are not among those that were found at last, by the driver's number."""
        return self.gpus.unreadable

    def xids(self) -> tuple[Xid, ...]:
        """Return the XID events since the last call."""
        return self.gpus.xids()

    async def instances(self, device: DeviceUuid) -> tuple[MigInstance, ...]:
        """Return the instances of a device in MIG mode."""
        return await self.remote.instances(device)

    async def _with_mig_state(self, gpu: Gpu) -> Gpu:
        if gpu.mode is not DeviceMode.MIG or gpu.fault is not None:
            return gpu
        try:
            self._known[gpu.uuid] = await self.remote.read_device(gpu.uuid)
            self._last_error = ""
        except LeaseholdError as error:
            if str(error) != self._last_error:
                logger.warning("MIG instances are as last seen: %s", error)
            self._last_error = str(error)
        seen = self._known.get(gpu.uuid)
        return gpu if seen is None else replace(gpu, mig=seen.state, instances=seen.instances)
