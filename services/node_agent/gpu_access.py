"""Access to the GPUs of a node and to their processes."""

from dataclasses import dataclass, field

from services.node_agent.gpus.device_health import HealthPolicy
from services.node_agent.gpus.driver import GpuDriver, SampleDevices
from services.node_agent.gpus.nvml.gpus import NvmlGpus
from services.node_agent.gpus.nvml.processes import NvmlProcesses
from services.node_agent.memory_limits.container_limits import LimitSetters
from services.node_agent.memory_limits.remote_limits import RemoteLimits
from services.node_agent.mig.partitioner import Partitioner
from services.node_agent.mps.runners import MpsRunners
from services.node_agent.partition.layout_reconciler import Partitioners
from services.node_agent.partition.partition_client import RemotePartitioner
from services.node_agent.settings import AgentSettings
from services.node_agent.time_slices.slice_setter import RemoteSliceSetter, SetTimeSlices


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGpus:
    driver: GpuDriver | RemotePartitioner
    sample: SampleDevices
    health_policy: HealthPolicy = field(default_factory=HealthPolicy)
    limits: LimitSetters | None = None
    """None if nothing may set limits."""
    mps: MpsRunners | None = None
    """None if nothing may run MPS."""
    set_time_slices: SetTimeSlices | None = None
    """None if nothing may set time slices."""
    has_processes: bool = True

    def partitioner(self, settings: AgentSettings, step_s: float) -> Partitioners | None:
        if not settings.partitions:
            return None
        if isinstance(self.driver, RemotePartitioner):
            return self.driver
        return Partitioner(self.driver, step_s=step_s)


def open_gpus(settings: AgentSettings) -> NodeGpus:
    gpus = NvmlGpus(proc=settings.proc_dir)
    socket = settings.partition_socket
    return NodeGpus(
        driver=with_partitioner(gpus, settings),
        sample=NvmlProcesses().sample,
        limits=None if socket is None else RemoteLimits(socket),
        mps=None if socket is None else MpsRunners.of_partitioner(socket),
        set_time_slices=None if socket is None else RemoteSliceSetter(socket).set,
    )


def with_partitioner(gpus: GpuDriver, settings: AgentSettings) -> GpuDriver | RemotePartitioner:
    if settings.partition_socket is None:
        return gpus
    return RemotePartitioner(gpus, settings.partition_socket)
