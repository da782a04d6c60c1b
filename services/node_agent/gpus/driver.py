"""The driver of the node's GPUs: its ports, and the choice between NVML and simulation."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

from services.node_agent.gpus.health_monitor import XidSource
from services.node_agent.gpus.inventory import Gpu
from services.node_agent.gpus.simulated.driver import describe, describe_instances
from services.node_agent.gpus.simulated.gpus import HANG_LIMIT_S, SimulatedGpus
from services.node_agent.mig.partitioner import MigDriver
from shared.model.names import NodeName

NVML = "nvml"
GPUS_HELP = "nvml, or a layout of simulated GPUs such as 8xA100-80GB, 4xT4+2xA10, 4xA100-40GB:mig"


class GpuLister(Protocol):
    """The GPUs of the node."""

    async def discover(self) -> tuple[Gpu, ...]:
        """Return all GPUs. Raises UnavailableError, with a remedy, while none responds."""
        ...


class GpuDriver(GpuLister, MigDriver, XidSource, Protocol):
    """The node's GPUs with all that the driver reports of them."""

    @property
    def unreadable(self) -> Mapping[int, str]:
        """By the driver's index, why the latest probe could not read a GPU."""
        ...


def open_gpu_driver(
    node: NodeName,
    gpus: str,
    *,
    fault_file: Path,
    mig_file: Path,
    simulated_hang_limit_s: float = HANG_LIMIT_S,
    driver_folder: Path | None = None,
) -> GpuDriver:
    """Return the node's GPUs; NVML is loaded only if `gpus` names it.

    Raises RequestError for an invalid layout. The files are those of simulated GPUs; the folder is
    that of their driver, to which GPUs and MIG instances are described.
    """
    if gpus != NVML:
        simulated = SimulatedGpus(
            node,
            gpus,
            fault_file,
            mig_file,
            hang_limit_s=simulated_hang_limit_s,
            on_instances=partial(describe_instances, driver_folder),
        )
        if driver_folder is not None:
            describe(node, simulated.gpus, driver_folder)
            simulated.mig.describe()
        return simulated
    from services.node_agent.gpus.nvml.gpus import NvmlGpus  # noqa: PLC0415 - not for simulation

    return NvmlGpus()
