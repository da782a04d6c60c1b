"""`python -m services.node_agent.partitioner`: changes MIG layouts for the agent of its node.

The one process with the privileges that this needs; see docs/decisions/0004.
"""

import asyncio
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from services.node_agent.gpus.driver import GpuDriver
from services.node_agent.gpus.nvml.gpus import NvmlGpus
from services.node_agent.partition.partition_server import PartitionServer
from shared.runtime.run import run
from shared.runtime.settings import load_or_exit, log_level_setting, setting

NAME = "partitioner"
ABOUT = """Changes the layouts of GPUs in MIG mode for this node's unprivileged agent.

It needs CAP_SYS_ADMIN and the driver's MIG capabilities (NVIDIA_MIG_CONFIG_DEVICES=all and
NVIDIA_MIG_MONITOR_DEVICES=all with NVIDIA's container toolkit), and nothing else: no network, no
API server, no kubelet."""
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
    log_level: str = log_level_setting()


async def partition(settings: PartitionerSettings, gpus: GpuDriver) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    uid = os.geteuid() if settings.agent_uid is None else settings.agent_uid
    async with PartitionServer(gpus, agent_uid=uid).serve(settings.socket):
        await stop.wait()


def main() -> None:
    settings = load_or_exit(
        PartitionerSettings,
        "python -m services.node_agent.partitioner",
        about=ABOUT,
        examples=EXAMPLES,
    )
    run(lambda: partition(settings, NvmlGpus()), service=NAME, log_level=settings.log_level)


if __name__ == "__main__":
    main()
