"""The node's GPUs, real or simulated: which door to them is opened, as settings say."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from services.node_agent.gpus.health_monitor import XidSource
from services.node_agent.gpus.simulated.gpus import SimulatedGpus
from services.node_agent.mig.partitioner import MigDriver
from services.node_agent.ports import Gpus
from shared.model.names import NodeName

NVML = "nvml"
GPUS_HELP = "nvml, or a layout of simulated GPUs such as 8xA100-80GB, 4xT4+2xA10, 4xA100-40GB:mig"


class GpuDriver(Gpus, MigDriver, XidSource, Protocol):
    """The node's GPUs."""

    @property
    def unreadable(self) -> Mapping[int, str]:
        """Why GPUs are not among those that were found at last, by the driver's number."""
        ...


def open_gpu_driver(node: NodeName, gpus: str, *, fault_file: Path, mig_file: Path) -> GpuDriver:
    """Return the node's GPUs; NVML's library is loaded only if it is meant.

    Raises RequestError for a layout that is none. The files are those of simulated GPUs.
    """
    if gpus != NVML:
        return SimulatedGpus(node, gpus, fault_file, mig_file)
    from services.node_agent.gpus.nvml.gpus import NvmlGpus  # noqa: PLC0415 - not for simulated GPUs

    return NvmlGpus()
