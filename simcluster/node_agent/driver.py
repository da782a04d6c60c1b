"""Simulated GPUs of the driver in C: production's code reads them through its libnvidia-ml."""

import asyncio
import ctypes
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from services.node_agent.gpus.inventory import Gpu
from services.node_agent.gpus.nvml.calls import TIMEOUT_S
from services.node_agent.gpus.nvml.gpus import NvmlGpus
from shared.model.names import DeviceUuid, NodeName
from simcluster.gpu_driver.build import build
from simcluster.gpu_driver.control import VARIABLE, control
from simcluster.node_agent.gpus import (
    DRIVER_FAULTS,
    HANG,
    HANGS,
    FaultFile,
    SimulatedGpu,
    hanging_gpus,
    parse_layout,
    reported,
    uuids_of,
)

SMS = 80
"""Streaming multiprocessors of every simulated GPU."""
STATE = "state"
"""The file that the driver maps, in the directory of a node's GPUs."""


class DriverGpus(NvmlGpus):
    """The GPUs of a layout, described to their driver anew when their faults change.

    The driver is compiled, and this process uses it from now on. Raises UnavailableError if it
    cannot be.
    """

    def __init__(
        self, node: NodeName, layout: str, folder: Path, fault_file: Path, *, hang_limit_s: float
    ) -> None:
        super().__init__()
        self.gpus = parse_layout(layout)
        self.faults = FaultFile(fault_file, uuids_of(node, self.gpus))
        self.state = folder / STATE
        self.hang_limit_s = hang_limit_s
        self._described = ""
        folder.mkdir(parents=True, exist_ok=True)
        os.environ[VARIABLE] = str(self.state)
        ctypes.CDLL(str(build() / "libnvidia-ml.so.1"))  # pynvml finds it by this name

    async def discover(self) -> tuple[Gpu, ...]:
        """Return all GPUs. Raises RequestError if the fault file is invalid."""
        await asyncio.to_thread(self.describe)
        devices = await super().discover()
        self.unread = hanging_gpus(self.gpus, self.faults)
        return tuple(replace(gpu, numa=self.gpus[gpu.index].numa) for gpu in devices)

    def describe(self) -> None:
        """Tell the driver which GPUs there are with which faults, and the events of this time."""
        faults = self.faults.read()
        self.timeout_s = self.hang_limit_s if HANGS.intersection(faults) else TIMEOUT_S
        described = zip(self.faults.uuids, self.gpus, faults, strict=True)
        text = "".join(f"{line}\n" for description in described for line in _lines(*description))
        if text != self._described:
            control(self.state, "create", stdin=text)
            self._described = text
        for xid in self.faults.xids():
            control(self.state, "xid", xid.device, str(xid.number))


def instances_in(folder: Path) -> dict[str, str]:
    """Return the profile of each MIG device of a node's GPUs, by its UUID."""
    state = folder / STATE
    shown = control(state, "show") if state.exists() else ""
    rows = (line.split() for line in shown.splitlines())
    return {row[1]: row[2] for row in rows if row[0] == "mig"}


def _lines(uuid: DeviceUuid, gpu: SimulatedGpu, fault: str) -> Iterator[str]:
    name, memory_mib, mig = reported(gpu, uuid, fault)
    fault = HANG if fault in HANGS else fault
    suffix = f"|{fault}" if fault in DRIVER_FAULTS else ""
    yield f"gpu|{name}|{gpu.model.product}|{memory_mib}|0|{SMS}|{int(mig)}{suffix}"
    for profile in gpu.model.mig:
        starts = ",".join(map(str, profile.starts))
        yield (
            f"profile|{profile.id}|{profile.name}|{profile.memory_mib}|{profile.compute_slices}|"
            f"{profile.memory_slices}|{profile.count}|{starts}"
        )
