"""The node's GPUs by its settings, real or simulated, with their partitioner and usage source."""

import logging
from collections.abc import Mapping

from services.node_agent.agent_timing import DEFAULT_TIMING, AgentTiming
from services.node_agent.gpus.device_faults import DISABLE_VARIABLE, ENABLE_VARIABLE, XidRules
from services.node_agent.gpus.driver import GpuDriver, GpuLister, open_gpu_driver
from services.node_agent.gpus.simulated.driver import DriverUsage
from services.node_agent.gpus.simulated.gpus import NoUsage
from services.node_agent.mig.partitioner import Partitioner
from services.node_agent.partition.layout_reconciler import LayoutPartitioner
from services.node_agent.partition.partition_client import RemoteMigGpus, RemotePartitioner
from services.node_agent.settings import AgentSettings
from services.node_agent.usage.monitor import UsageSource

logger = logging.getLogger(__name__)


def open_gpus(
    settings: AgentSettings, timing: AgentTiming = DEFAULT_TIMING
) -> GpuDriver | RemoteMigGpus:
    """Return the node's GPUs."""
    gpus = open_gpu_driver(
        settings.node_name,
        settings.gpus,
        fault_file=settings.fault_file or settings.state_dir / "faults.json",
        mig_file=settings.mig_file or settings.state_dir / "simulated-mig.json",
        simulated_hang_limit_s=timing.simulated_hang_limit_s,
        driver_folder=settings.gpu_driver_dir,
    )
    if settings.partition_socket is None:
        return gpus
    return RemoteMigGpus(gpus, RemotePartitioner(settings.partition_socket))


def partitioner_of(
    settings: AgentSettings, gpus: GpuDriver | RemoteMigGpus, timing: AgentTiming
) -> LayoutPartitioner | None:
    """Return the partitioner of the GPUs; None: layouts are not changed."""
    if not settings.partitions:
        return None
    return (
        gpus.remote
        if isinstance(gpus, RemoteMigGpus)
        else Partitioner(gpus, step_s=timing.partition_step_s)
    )


def read_xid_rules(environ: Mapping[str, str]) -> XidRules:
    """Return which XIDs make a GPU unhealthy, by the environment; log its invalid entries."""
    rules = XidRules.from_environment(environ)
    if rules.invalid_words:
        words = ", ".join(rules.invalid_words)
        logger.warning(
            "%s and %s list XIDs by number, not %s", DISABLE_VARIABLE, ENABLE_VARIABLE, words
        )
    return rules


def usage_source_of(settings: AgentSettings, gpus: GpuLister) -> UsageSource:
    """Return the source of the processes on the node's GPUs."""
    if settings.simulated:
        idle = NoUsage(gpus.discover)
        folder = settings.gpu_driver_dir
        return idle if folder is None else DriverUsage(idle, folder)
    from services.node_agent.gpus.nvml.processes import NvmlProcesses  # noqa: PLC0415 - needs NVML

    return NvmlProcesses()
