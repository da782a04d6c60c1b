"""Settings and GPUs of node agents with simulated GPUs."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from services.node_agent.allocate.cdi_files import DriverPaths
from services.node_agent.gpu_access import NodeGpus, open_gpus, with_partitioner
from services.node_agent.gpus.device_health import HealthPolicy
from services.node_agent.gpus.nvml.calls import count_gpus
from services.node_agent.gpus.nvml.memory_limits import NvmlMemoryLimits
from services.node_agent.gpus.nvml.processes import NvmlProcesses
from services.node_agent.memory_limits.cgroup_tree import CgroupTree
from services.node_agent.memory_limits.container_limits import LimitSetters
from services.node_agent.memory_limits.limit_setter import LimitSetter
from services.node_agent.memory_limits.remote_limits import RemoteLimits
from services.node_agent.mps.control import PROBE
from services.node_agent.mps.daemon_directories import MpsNode
from services.node_agent.mps.runners import MpsRunners
from services.node_agent.settings import AgentSettings
from services.node_agent.time_slices.slice_setter import (
    RemoteSliceSetter,
    SetTimeSlices,
    SliceSetter,
)
from shared.model.errors import RequestError, UnavailableError
from shared.runtime.settings import setting
from simcluster.gpu_driver.build import build
from simcluster.gpu_driver.control import VARIABLE
from simcluster.gpu_driver.mps_control import command
from simcluster.node_agent.driver import STATE, DriverGpus
from simcluster.node_agent.gpus import HANG_LIMIT_S, NoUsage, SimulatedGpus, parse_layout

logger = logging.getLogger(__name__)

ABOUT = """A node agent whose GPUs are simulated, for machines that have none.

It takes the flags of `python -m services.node_agent`, and those of the GPUs."""
EXAMPLES = (
    "python -m simcluster.node_agent --node node-0 --gpus 8xA100-80GB \\",
    "    --kubelet-dir .leasehold/nodes/node-0 \\",
    "    --kubeconfig .leasehold/accounts/node-agent-node-0 \\",
    "    --state-dir .leasehold/agents/node-0      # beside a simulated kubelet",
    "python -m simcluster.node_agent --gpus 4xT4 --kubelet-token-file /tmp/token \\",
    "    --kubelet-insecure                        # beside a real kubelet",
)
GPUS_HELP = (
    "the GPUs, such as 8xA100-80GB, 4xT4+2xA10, 4xA100-40GB:mig, 2xT4@0+2xT4@1 (by NUMA node); "
    "local: this machine's own"
)
LOCAL = "local"
"""The layout of this machine's own GPUs."""
MIG_FILE = "simulated-mig.json"
BACKOFF_S = 1.0
"""First backoff of a simulated GPU that was cordoned, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedAgentSettings(AgentSettings):
    """Flags of `python -m simcluster.node_agent`."""

    gpus: str = setting("4xT4", GPUS_HELP)
    fault_file: Path | None = setting(
        None, 'faults of the GPUs: {"0": "unhealthy"}, by index or UUID, read every 5 s; '
        "others: hang, hang-unnamed, vanish, xid-79 (any number), memory-8192 (its MiB from now "
        "on), mode-flip, create-fails, compute-fails, create-nothing, create-hangs, busy; default: "
        "STATE_DIR/faults.json"
    )  # fmt: skip
    mig_file: Path | None = setting(
        None, f"MIG instances of GPUs simulated in Python; default: STATE_DIR/{MIG_FILE}"
    )
    gpu_driver_dir: Path | None = setting(
        None, "directory of the GPUs' driver in C, which programs use: the agent makes the GPUs "
        "there, and reads them through its libnvidia-ml; without it or a C compiler, they are "
        "simulated in Python"
    )  # fmt: skip

    cgroup_root: Path | None = setting(
        None, "directory tree that stands for the node's cgroups, where the GPUs' driver in C "
        "limits memory"
    )  # fmt: skip

    def check(self) -> None:
        """Raise RequestError for an unknown strategy or layout."""
        _ = self.device_list_strategies
        if not self.local:
            parse_layout(self.gpus)

    @property
    def local(self) -> bool:
        """Whether the GPUs are those of this machine, not simulated ones."""
        return self.gpus == LOCAL

    @property
    def partitions(self) -> bool:
        """Whether MIG layouts are changed, for which simulated GPUs need no privileges."""
        return self.partition and not self.local

    @property
    def cdi_directory(self) -> Path:
        """The directory of CDI specifications: by default, one that no runtime reads."""
        return self.cdi_dir or self.state_dir.absolute() / "cdi"

    @property
    def driver_places(self) -> DriverPaths | None:
        """Return None: containers need no files of the driver."""
        return None

    @property
    def bundle_directories(self) -> tuple[Path, ...]:
        """The bundles of the simulated kubelet's container runtime."""
        return tuple(map(Path, self.bundle_dir)) or (self.kubelet_dir / "bundles",)

    @property
    def monitor_address(self) -> str | None:
        """Address of the usage metrics, or None if they are not served."""
        return self.monitor_http or None

    @property
    def library_origin(self) -> Path | None:
        """HAMi-core's library, or None if the simulated driver enforces limits itself."""
        if not self.local:
            return self.library_source
        return super(SimulatedAgentSettings, self).library_origin


def check_layout(text: str) -> None:
    """Raise RequestError for an invalid layout, and for GPUs of this machine that it lacks."""
    if text != LOCAL:
        parse_layout(text)
        return
    try:
        count = count_gpus()
    except UnavailableError as error:
        why = str(error).partition(". ")[0]
        raise RequestError(
            f"--gpus local needs a GPU of NVIDIA in this machine, and its driver: {why}; check "
            "`nvidia-smi -L`, or omit the flag to simulate GPUs"
        ) from error
    if not count:
        raise RequestError("--gpus local: NVIDIA's driver lists no GPU; check `nvidia-smi -L`")


def simulated_gpus(
    settings: SimulatedAgentSettings,
    *,
    backoff_s: float = BACKOFF_S,
    hang_limit_s: float = HANG_LIMIT_S,
) -> NodeGpus:
    """Return the GPUs of a layout: of their driver in C if it has a directory and is compiled."""
    if settings.local:
        return replace(open_gpus(settings), mps=_mps(settings))
    faults = settings.fault_file or settings.state_dir / "faults.json"
    gpus = _driver_gpus(settings, faults, hang_limit_s) or SimulatedGpus(
        settings.node_name,
        settings.gpus,
        faults,
        settings.mig_file or settings.state_dir / MIG_FILE,
        hang_limit_s=hang_limit_s,
    )
    return NodeGpus(
        driver=with_partitioner(gpus, settings),
        sample=NvmlProcesses().sample if isinstance(gpus, DriverGpus) else NoUsage(gpus).sample,
        health_policy=HealthPolicy(first_backoff_s=backoff_s),
        limits=_limits(settings) if isinstance(gpus, DriverGpus) else None,
        mps=_mps(settings) if isinstance(gpus, DriverGpus) else None,
        set_time_slices=_slices(settings) if isinstance(gpus, DriverGpus) else None,
        has_processes=False,
    )


def _limits(settings: SimulatedAgentSettings) -> LimitSetters | None:
    if settings.cgroup_root is None:
        return None
    if settings.partition_socket is not None:
        return RemoteLimits(settings.partition_socket)
    return LimitSetter(
        NvmlMemoryLimits(),
        CgroupTree(settings.cgroup_root),
        fences=settings.state_dir / "memory-limit-fences.json",
        proc=settings.proc_dir,
    )


def _mps(settings: SimulatedAgentSettings) -> MpsRunners:
    if settings.partition_socket is not None:
        return MpsRunners.of_partitioner(settings.partition_socket)
    root = settings.state_dir.absolute() / "mps"
    if settings.local:  # by the driver's own program, as this user
        return MpsRunners.of_node(MpsNode(root))
    return simulated_mps(root, settings.gpu_driver_dir)


def simulated_mps(root: Path, gpus: Path | None) -> MpsRunners:
    """Return what runs MPS of simulated GPUs."""
    probe = ("env", *driver_variables(gpus), *PROBE)
    return MpsRunners.of_node(MpsNode(root, program=command(), probe_program=probe))


def _slices(settings: SimulatedAgentSettings) -> SetTimeSlices:
    if settings.partition_socket is not None:
        return RemoteSliceSetter(settings.partition_socket).set
    return simulated_slices(settings.gpu_driver_dir)


def simulated_slices(gpus: Path | None) -> SetTimeSlices:
    """Return what sets the time slices of simulated GPUs: their driver's nvidia-smi."""
    return SliceSetter(("env", *driver_variables(gpus), str(build() / "nvidia-smi"))).set


def driver_variables(gpus: Path | None) -> list[str]:
    """Return the variables by which a program finds simulated GPUs."""
    variables = [f"LD_LIBRARY_PATH={build()}"]
    return variables if gpus is None else [*variables, f"{VARIABLE}={gpus / STATE}"]


def _driver_gpus(
    settings: SimulatedAgentSettings, faults: Path, hang_limit_s: float
) -> DriverGpus | None:
    if settings.gpu_driver_dir is None:
        return None
    try:
        return DriverGpus(
            settings.node_name,
            settings.gpus,
            settings.gpu_driver_dir,
            faults,
            hang_limit_s=hang_limit_s,
        )
    except UnavailableError as error:
        logger.warning("the GPUs are simulated in Python, for the agent only: %s", error)
        return None
