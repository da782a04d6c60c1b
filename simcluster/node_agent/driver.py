"""The driver of simulated GPUs, which programs on this machine use: description and usage."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

from services.node_agent.gpus.inventory import DeviceSample
from services.node_agent.gpus.nvml.processes import NvmlProcesses
from services.node_agent.mig.instances import InstanceProfile
from shared.model.errors import UnavailableError
from shared.model.names import NodeName
from simcluster.node_agent.gpus import NoUsage, SimulatedGpu, uuid_of

DESCRIPTION = "description"
INSTANCES = "instances"
LIBRARY = "libnvidia-ml.so.1"
MOST_GPUS = 16
"""The driver has no more."""
SMS = 80
"""Streaming multiprocessors of every simulated GPU."""


def describe(node: NodeName, gpus: Sequence[SimulatedGpu], folder: Path) -> None:
    """Write which GPUs the driver is to have, for its program `gpu-control create`.

    Raises UnavailableError if the file cannot be written.
    """
    lines = [
        line for index, gpu in enumerate(gpus[:MOST_GPUS]) for line in _lines(node, index, gpu)
    ]
    _write(folder, DESCRIPTION, "".join(f"{line}\n" for line in lines))


def describe_instances(folder: Path | None, lines: str) -> None:
    """Write which MIG instances the driver is to have, for `gpu-control instances`.

    Without a folder nothing is written. Raises UnavailableError if the file cannot be written.
    """
    if folder is not None:
        _write(folder, INSTANCES, lines)


def _write(folder: Path, name: str, text: str) -> None:
    draft = folder / f".{name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft.write_text(text)
        draft.replace(folder / name)
    except OSError as error:
        raise UnavailableError(f"{error.filename or folder}: {error.strerror}") from error


class DriverUsage:
    """Usage of simulated GPUs, as NVML reports it once their driver has been compiled."""

    def __init__(self, idle: NoUsage, folder: Path) -> None:
        self.idle = idle
        self.library = folder / LIBRARY
        self._is_loaded = False

    async def sample(self) -> tuple[DeviceSample, ...]:
        """Return all devices; those without a program are idle."""
        idle = await self.idle.sample()
        if not self.library.exists():
            return idle
        if not self._is_loaded:
            ctypes.CDLL(str(self.library))  # pynvml finds the loaded library by its name
            self._is_loaded = True
        measured = {one.device: one for one in await NvmlProcesses().sample()}
        return tuple(measured.get(one.device, one) for one in idle)


def _lines(node: NodeName, index: int, gpu: SimulatedGpu) -> list[str]:
    model = gpu.model
    own = f"gpu|{uuid_of(node, index)}|{model.product}|{model.memory_mib}|{SMS}|{int(gpu.mig)}"
    return [own, *map(_profile_line, model.mig if gpu.mig else ())]


def _profile_line(profile: InstanceProfile) -> str:
    starts = ",".join(map(str, profile.starts))
    return (
        f"profile|{profile.id}|{profile.name}|{profile.memory_mib}|{profile.compute_slices}|"
        f"{profile.memory_slices}|{profile.count}|{starts}"
    )
