"""Containers whose programs get a percent of the GPU's time, as the agent limits them."""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from services.node_agent.compute_time.steering import STEER_S
from services.node_agent.compute_time.time_files import write_time_limits
from services.node_agent.compute_time.time_layouts import TimeLimit
from tests.hardware.machine import Machine
from tests.support.gpu_driver import GpuLoad


@dataclass(kw_only=True)
class TimeContainer:
    machine: Machine
    library: Path
    directory: Path
    percent: int

    def __post_init__(self) -> None:
        self.directory.mkdir()
        self._limit()

    @property
    def variables(self) -> dict[str, str]:
        """Of its programs."""
        return {
            "LD_PRELOAD": str(self.library),
            "LEASEHOLD_TIME_LIMITS": str(self.directory / "limits"),
            "LEASEHOLD_TIME_USE": str(self.directory / "use"),
        }

    def load(self) -> GpuLoad:
        return self.machine.load(**self.variables)

    def torch(self) -> GpuLoad:
        return self.machine.torch(**self.variables)

    @contextlib.contextmanager
    def steered(self, program: GpuLoad) -> Iterator[None]:
        """Let it know what NVML shows of its program, as often as the agent does."""
        ends = threading.Event()
        thread = threading.Thread(target=self._steer, args=(program.process.pid, ends))
        thread.start()
        try:
            yield
        finally:
            ends.set()
            thread.join()

    def _steer(self, pid: int, ends: threading.Event) -> None:
        while not ends.wait(STEER_S):
            processes = self.machine.sample().processes
            busy = sum(process.busy_percent or 0 for process in processes if process.pid == pid)
            self._limit(measured=busy, measured_at=time.monotonic_ns())

    def _limit(self, measured: int = 0, measured_at: int = 0) -> None:
        limit = TimeLimit(
            device=self.machine.gpu.uuid,
            percent=self.percent,
            allowed=self.percent,
            measured=measured,
            measured_at=measured_at,
        )
        write_time_limits(self.directory / "limits", [limit])
