"""`python -m services.node_agent.partitioner`: the one process with privileges."""

import asyncio
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from services.node_agent.gpus.driver import GpuDriver
from services.node_agent.gpus.nvml.gpus import NvmlGpus
from services.node_agent.gpus.nvml.memory_limits import NvmlMemoryLimits
from services.node_agent.memory_limits.cgroup_tree import CGROUPS, CgroupTree
from services.node_agent.memory_limits.limit_setter import LimitSetter
from services.node_agent.mps.daemon_directories import MpsNode
from services.node_agent.mps.runners import MpsRunners
from services.node_agent.partition.partition_server import PartitionServer
from services.node_agent.time_slices.slice_setter import SetTimeSlices, SliceSetter
from shared.runtime.run import run
from shared.runtime.settings import load_or_exit, log_level_setting, setting

NAME = "partitioner"
ABOUT = """Changes layouts of GPUs in MIG mode, sets the driver's limits on the memory of
containers and the length of time slices, and runs control daemons of MPS, for this node's
unprivileged agent.

It needs CAP_SYS_ADMIN; for MIG the driver's capabilities (NVIDIA_MIG_CONFIG_DEVICES=all and
NVIDIA_MIG_MONITOR_DEVICES=all with NVIDIA's container toolkit); for limits of memory the driver
R615, the PIDs of the node and its /sys/fs/cgroup, writable; for MPS the PIDs of the node and
NVIDIA_DRIVER_CAPABILITIES=compute,utility; for time slices nvidia-smi. It needs no
network, no API server and no kubelet."""
EXAMPLES = (
    "python -m services.node_agent.partitioner --socket /run/leasehold/partition.sock",
    "python -m services.node_agent --partition-socket /run/leasehold/partition.sock   # beside it",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionerSettings:
    socket: Path = setting(
        Path("/run/leasehold/partition.sock"), "socket on which the agent of this node connects"
    )
    agent_uid: int | None = setting(
        None, "user whose processes are served; default: the partitioner's own", at_most=2**32 - 2
    )
    cgroup_root: Path = setting(
        CGROUPS, "the node's cgroups, version 2, for limits of memory by the driver"
    )
    proc_dir: Path = setting(Path("/proc"), "the node's processes; in a pod: /proc with hostPID")
    fences_file: Path | None = setting(
        None, "file of the fences of limits of memory, on the node; a reboot may remove it; "
        "default: memory-limit-fences.json beside the socket"
    )  # fmt: skip
    mps_dir: Path | None = setting(
        None, "directory of control daemons of MPS, at the same path as on the node: mps in the "
        "agent's state directory; without it, none are started"
    )  # fmt: skip
    log_level: str = log_level_setting()

    @property
    def fences(self) -> Path:
        return self.fences_file or self.socket.with_name("memory-limit-fences.json")


async def partition(
    settings: PartitionerSettings,
    gpus: GpuDriver,
    mps: MpsRunners | None = None,
    set_time_slices: SetTimeSlices | None = None,
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    uid = os.geteuid() if settings.agent_uid is None else settings.agent_uid
    limits = LimitSetter(
        NvmlMemoryLimits(),
        CgroupTree(settings.cgroup_root),
        fences=settings.fences,
        proc=settings.proc_dir,
    )
    server = PartitionServer(
        gpus, agent_uid=uid, limits=limits, mps=mps, set_time_slices=set_time_slices
    )
    async with server.serve(settings.socket):
        await stop.wait()


def main() -> None:
    settings = load_or_exit(
        PartitionerSettings,
        "python -m services.node_agent.partitioner",
        about=ABOUT,
        examples=EXAMPLES,
    )
    mps = None
    if settings.mps_dir is not None:
        mps = MpsRunners.of_node(MpsNode(settings.mps_dir, proc=settings.proc_dir))
    run(
        lambda: partition(settings, NvmlGpus(), mps, SliceSetter().set),
        service=NAME,
        log_level=settings.log_level,
    )


if __name__ == "__main__":
    main()
