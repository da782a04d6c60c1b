"""`python -m simcluster.node_agent.partitioner`: production's partitioner, with simulated GPUs."""

from dataclasses import dataclass
from pathlib import Path

from services.node_agent.gpus.driver import GpuDriver
from services.node_agent.partitioner import ABOUT, NAME, PartitionerSettings, partition
from shared.model.names import NodeName
from shared.runtime.run import run
from shared.runtime.settings import load_or_exit, setting
from simcluster.node_agent.agent import GPUS_HELP, MIG_FILE, simulated_mps, simulated_slices
from simcluster.node_agent.driver import DriverGpus
from simcluster.node_agent.gpus import HANG_LIMIT_S, SimulatedGpus


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPartitionerSettings(PartitionerSettings):
    """Flags of `python -m simcluster.node_agent.partitioner`."""

    node: str = setting("node-0", "the node's name")
    gpus: str = setting("4xA100-40GB:mig", GPUS_HELP)
    state_dir: Path = setting(Path(), f"directory of faults.json and {MIG_FILE}")
    gpu_driver_dir: Path | None = setting(
        None, "directory of the GPUs' driver in C; without it, they are simulated in Python"
    )  # fmt: skip


def main() -> None:
    """Read the settings and run."""
    settings = load_or_exit(
        SimulatedPartitionerSettings, "python -m simcluster.node_agent.partitioner", about=ABOUT
    )
    node = NodeName(settings.node)
    faults = settings.state_dir / "faults.json"
    gpus: GpuDriver = (
        SimulatedGpus(node, settings.gpus, faults, settings.state_dir / MIG_FILE)
        if settings.gpu_driver_dir is None
        else DriverGpus(
            node, settings.gpus, settings.gpu_driver_dir, faults, hang_limit_s=HANG_LIMIT_S
        )
    )
    mps = None
    if settings.mps_dir is not None and settings.gpu_driver_dir is not None:
        mps = simulated_mps(settings.mps_dir, settings.gpu_driver_dir)
    set_time_slices = None
    if settings.gpu_driver_dir is not None:
        set_time_slices = simulated_slices(settings.gpu_driver_dir)
    run(
        lambda: partition(settings, gpus, mps, set_time_slices),
        service=NAME,
        log_level=settings.log_level,
    )


if __name__ == "__main__":
    main()
