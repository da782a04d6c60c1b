"""Containers whose compute time the library limits, on the simulated GPUs' driver."""

import time
from dataclasses import dataclass, field
from pathlib import Path

import pynvml

from services.node_agent.compute_time.time_files import read_time_use, write_time_limits
from services.node_agent.compute_time.time_layouts import TimeLimit, TimeUse
from shared.model.names import DeviceUuid
from tests.support.gpu_driver import DriverGpu, GpuDriver, GpuLoad


@dataclass(kw_only=True)
class TimeContainer:
    """A container with a limit in percent of each GPU; its processes run beside the test."""

    driver: GpuDriver
    library: Path
    directory: Path
    gpus: dict[str, int]
    """Percents by UUID."""
    loads: list[GpuLoad] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True)
        self.limit(*self.gpus.values())

    def limit(self, *percents: int, measured: int = 0, measured_at: int = 0) -> None:
        """Set its limits, as the agent does; `measured` is what NVML shows of its first GPU."""
        self.gpus = dict(zip(self.gpus, percents, strict=True))
        limits = [
            TimeLimit(
                device=DeviceUuid(uuid),
                percent=percent,
                allowed=percent,
                measured=measured,
                measured_at=measured_at,
            )
            for uuid, percent in self.gpus.items()
        ]
        write_time_limits(self.directory / "limits", limits)

    def load(self, *, preload: str = "", **variables: str) -> GpuLoad:
        load = self.driver.load(
            LD_PRELOAD=f"{self.library} {preload}".strip(),
            LEASEHOLD_TIME_LIMITS=str(self.directory / "limits"),
            LEASEHOLD_TIME_USE=str(self.directory / "use"),
            NVIDIA_VISIBLE_DEVICES=",".join(self.gpus),
            **variables,
        )
        self.loads.append(load)
        return load

    def show_measured(self, gpu: DriverGpu) -> None:
        """Let it know what NVML shows of its only process on a GPU, as the agent does."""
        handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        samples = pynvml.nvmlDeviceGetProcessUtilization(handle, 0)
        pid = self.loads[0].pid
        self.limit(
            self.gpus[gpu.uuid],
            measured=sum(sample.smUtil for sample in samples if sample.pid == pid),
            measured_at=time.monotonic_ns(),
        )

    def use(self) -> tuple[TimeUse, ...]:
        uses = read_time_use(self.directory / "use", len(self.gpus))
        assert uses is not None
        return uses

    def ran_us(self, gpu: DriverGpu) -> tuple[int, int]:
        """Return what its processes have had of a GPU together, and until when, in μs."""
        ran = self.driver.ran(gpu)
        pids = {load.pid for load in self.loads}
        mine = [time for pid, time in ran.items() if pid in pids]
        return sum(time.ran_us for time in mine), max(time.at_us for time in mine)
