"""The node's GPUs, real or simulated: which door to them is opened, as settings say."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from services.node_agent.gpus.health_monitor import Xids
from services.node_agent.gpus.simulated_gpus import SimulatedGpus
from services.node_agent.mig.partitioner import Driver
from services.node_agent.ports import Gpus
from shared.model.names import NodeName

NVML = "nvml"
LAYOUTS = "nvml, or a layout of simulated GPUs such as 8xA100-80GB, 4xT4+2xA10, 4xA100-40GB:mig"


class Hardware(Gpus, Driver, Xids, Protocol):
    """The node's GPUs."""

    @property
    def unseen(self) -> Mapping[int, str]:
        """Why GPUs are not among those that were found at last, by the driver's number."""
        ...


def hardware_of(node: NodeName, gpus: str, *, fault_file: Path, mig_file: Path) -> Hardware:
    """Return the node's GPUs; NVML's library is loaded only if it is meant.

    Raises RequestError for a layout that is none. The files are those of simulated GPUs.
    """
    if gpus != NVML:
        return SimulatedGpus(node, gpus, fault_file, mig_file)
    from services.node_agent.gpus.nvml import NvmlGpus  # noqa: PLC0415 - not for simulated GPUs

    return NvmlGpus()
