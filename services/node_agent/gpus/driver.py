"""What a driver of the node's GPUs offers."""

from collections.abc import Mapping
from typing import Protocol

from services.node_agent.gpus.health_monitor import XidSource
from services.node_agent.gpus.inventory import Gpu
from services.node_agent.mig.partitioner import MigDriver


class GpuDriver(MigDriver, XidSource, Protocol):
    """The node's GPUs with all that the driver reports of them."""

    async def discover(self) -> tuple[Gpu, ...]:
        """Return all GPUs. Raises UnavailableError, with a remedy, while none responds."""
        ...

    @property
    def unreadable(self) -> Mapping[int, str]:
        """By the driver's index, why the latest probe could not read a GPU."""
        ...
