"""What the agent needs of a driver of GPUs."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from services.node_agent.gpus.device_faults import Xid
from services.node_agent.gpus.inventory import DeviceSample, Gpu
from services.node_agent.mig.partitioner import MigDriver
from shared.model.devices.device import UnreadDevice

SampleDevices = Callable[[], Awaitable[tuple[DeviceSample, ...]]]
"""Raises UnavailableError while the driver does not respond."""
TakeXids = Callable[[], tuple[Xid, ...]]


class GpuDiscovery(Protocol):
    async def discover(self) -> tuple[Gpu, ...]:
        """Raises UnavailableError, with a remedy, while none responds."""
        ...

    @property
    def unreadable(self) -> Mapping[int, str]: ...

    @property
    def unread(self) -> tuple[UnreadDevice, ...]: ...


class GpuDriver(GpuDiscovery, MigDriver, Protocol):
    def xids(self) -> tuple[Xid, ...]: ...
