"""Compute time: a library in the container holds launches to a part of the GPU's time."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from services.node_agent.compute_time.time_files import (
    read_time_limits,
    read_time_use,
    remove_time_use,
    reset_time_use,
    write_time_limits,
)
from services.node_agent.compute_time.time_layouts import TimeLimit, TimeUse
from services.node_agent.compute_time.time_library import TimeLibrary
from services.node_agent.compute_time.time_shares import DEFAULT_PRIORITY, forgeries
from services.node_agent.enforcers.enforcer import Difference, Enforcer, Facts, HeldLimit, ReadBack
from services.node_agent.gpus.inventory import Gpu, SharingConfig
from services.node_agent.isolation.container_files import ContainerFiles
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from shared.dialects.compute_time import LIMITS, USE_DIRECTORY, mounted_at
from shared.dialects.hami_core import PRIORITY, shares_by_index
from shared.model.devices.device import DeviceMode
from shared.model.errors import UnavailableError
from shared.model.events.node_events import ViolationFound, ViolationReason

USE = "use"
OFF = (
    "GPU time holds no cores here: set --compute-by-time of the node agent to force or default "
    "(not confirmed on a GPU yet)"
)


def limits_path(entry: CheckpointEntry) -> Path | None:
    mount = mounted_at(entry.limits, LIMITS)
    return None if mount is None else Path(mount.host_path)


def use_path(entry: CheckpointEntry) -> Path | None:
    mount = mounted_at(entry.limits, USE_DIRECTORY)
    return None if mount is None else Path(mount.host_path) / USE


def time_limits(entry: CheckpointEntry) -> tuple[TimeLimit, ...]:
    return tuple(
        TimeLimit(device=share.device, percent=share.cores_percent, allowed=share.cores_percent)
        for share in shares_by_index(entry.lease, entry.allocation.container)
        if share.compute == "time"
    )


def priority_of(entry: CheckpointEntry) -> int:
    return int(entry.limits.environment.get(PRIORITY, DEFAULT_PRIORITY))


def written_use(entry: CheckpointEntry) -> tuple[TimeUse, ...]:
    path = use_path(entry)
    count = len(time_limits(entry))
    uses = None if path is None else read_time_use(path, count)
    return (TimeUse(),) * count if uses is None else uses


class ComputeTime(Enforcer):
    missing_reason = ViolationReason.ISOLATION_LOST
    differs_reason = ViolationReason.TAMPERED
    facts = Facts(
        name="time",
        memory="",
        compute="in kernels, CUDA graphs and cooperative launches of any length, on average",
        parts=True,
        not_held=(
            "copies, what kernels of several streams do at once, legacy launches (cuLaunchGrid), "
            "calls that go around the library, and programs that do not load it, such as static "
            "ones"
        ),
        needs=(
            "--compute-by-time of the node agent, which is off by default since no GPU has "
            "confirmed it (see [compute by time](compute-time.md)); not on GPUs in MIG mode"
        ),
        resize="at once, for running programs",
        shown="the limits file of each container, and what its processes were charged",
    )

    def __init__(self, files: ContainerFiles, library: TimeLibrary | None = None) -> None:
        self.files = files
        self.library = library
        """None if it is off."""
        self.overcharges: tuple[ViolationFound, ...] = ()

    @property
    def findings(self) -> tuple[ViolationFound, ...]:
        return self.overcharges

    def missing(self, gpu: Gpu, sharing: SharingConfig) -> str:
        if gpu.mode is DeviceMode.MIG:
            return "instances of MIG hold their cores themselves"
        return OFF if self.library is None else self.library.missing_reason

    async def find_out(self, gpus: Sequence[Gpu]) -> None:
        if self.library is not None:
            await self.library.install()

    async def prepare(self, entry: CheckpointEntry, *, starting: bool, new: bool) -> None:
        """A starting container has no saved time."""
        if self.library is not None:
            await self.library.install()
        await self.resize(entry)
        await self.files.prepare(entry.limits, starting=starting, new=new)
        await asyncio.to_thread(_renew_use, entry, starting=starting)

    async def resize(self, entry: CheckpointEntry) -> None:
        path = limits_path(entry)
        if path is None:
            return
        try:
            await asyncio.to_thread(write_time_limits, path, time_limits(entry))
        except OSError as error:
            raise UnavailableError(f"{error.filename}: {error.strerror}") from error

    async def read_back(self, entry: CheckpointEntry) -> ReadBack | None:
        path = limits_path(entry)
        if path is None:
            return None
        devices = [limit.device for limit in time_limits(entry)]
        limits = await asyncio.to_thread(read_time_limits, path, devices)
        if limits is None:
            return ReadBack(problem="the file with its limits of cores is gone")
        return ReadBack(
            limits=tuple(
                HeldLimit(device=limit.device, cores_percent=limit.percent)
                for limit in limits
                if limit.allowed >= limit.percent
            )
        )

    def audit(self, entry: CheckpointEntry, read: ReadBack) -> Iterator[Difference]:
        yield from super().audit(entry, read)
        for text in _forged(entry):
            yield Difference(reason=ViolationReason.TAMPERED, text=text)


def _renew_use(entry: CheckpointEntry, *, starting: bool) -> None:
    use = use_path(entry)
    if use is None:
        return
    try:
        if starting:
            remove_time_use(use)
        if starting or list(_forged(entry)):
            reset_time_use(use)
    except OSError as error:
        raise UnavailableError(f"{error.filename}: {error.strerror}") from error


def _forged(entry: CheckpointEntry) -> Iterator[str]:
    use = use_path(entry)
    if use is None:
        return
    uses = read_time_use(use, len(time_limits(entry)))
    if uses is None:
        yield (
            "the file in which its processes count their GPU time together is gone or cut off; "
            "those that run may have the whole limit each: restart the container"
        )
        return
    now_ns = time.monotonic_ns()
    for written in uses:
        for forgery in forgeries(written, now_ns):
            yield f"it has changed the file in which it counts its GPU time: {forgery}"
