"""HAMi-core holds a container to the limits in its region file."""

import asyncio
from collections.abc import Sequence, Set

from services.node_agent.enforcers.enforcer import Enforcer, Facts, HeldLimit, ReadBack
from services.node_agent.gpus.inventory import Gpu, SharingConfig
from services.node_agent.isolation.container_files import ContainerFiles
from services.node_agent.isolation.region import Region
from services.node_agent.isolation.region_image import NO_CORE_LIMIT, region_path_of, seed_of
from services.node_agent.isolation.region_reader import read_region
from services.node_agent.isolation.region_writer import write_limits, write_overrides
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from shared.dialects.hami_core import shares_by_index
from shared.model.errors import UnavailableError
from shared.model.events.node_events import ViolationReason
from shared.model.names import PodUid

NO_LIBRARY = (
    "HAMi-core's library is missing or unusable on its node, so that limits would not be enforced"
)
NOT_MEASURED = (
    "the driver does not report its memory, as it is the host's: limits would not be enforced, and "
    "pods get it whole or without a limit, unless the agent's --unified-memory-mib says what to "
    "share"
)


def _limits(
    entry: CheckpointEntry, memory: Sequence[int], cores: Sequence[int]
) -> tuple[HeldLimit, ...]:
    shares = shares_by_index(entry.lease, entry.allocation.container)
    return tuple(
        HeldLimit(
            device=share.device,
            memory_bytes=memory_bytes,
            cores_percent=percent if percent < NO_CORE_LIMIT else 0,
        )
        for share, memory_bytes, percent in zip(shares, memory, cores, strict=False)
    )


class HamiCore(Enforcer):
    missing_reason = ViolationReason.ISOLATION_LOST
    differs_reason = ViolationReason.TAMPERED
    facts = Facts(
        name="hami-core",
        memory="what programs allocate with cudaMalloc, cuMemAlloc and managed memory",
        compute="about, by delaying launches",
        parts=True,
        not_held=(
            "memory pools, CUDA graphs, calls that go around the library, and programs that do not "
            "load it, such as static ones"
        ),
        needs="the library libvgpu.so on the node (see [HAMi-core](hami-core.md))",
        resize="memory at the next allocation; cores for processes that start later",
        shown="the region file of each container, and NVML's list of processes",
    )

    def __init__(self, files: ContainerFiles) -> None:
        self.files = files

    def missing(self, gpu: Gpu, sharing: SharingConfig) -> str:
        if self.files.library.unusable_reason:
            return NO_LIBRARY
        if not (gpu.measured or sharing.unified_mib):
            return NOT_MEASURED
        return ""

    async def prepare(self, entry: CheckpointEntry, *, starting: bool, new: bool) -> None:
        await self.files.prepare(entry.limits, starting=starting, new=new)

    def wanted(self, entry: CheckpointEntry) -> tuple[HeldLimit, ...]:
        """A dialect may give a container's GPUs the smallest limit."""
        seed = seed_of(entry.limits.environment)
        return _limits(entry, seed.memory_limits, seed.core_limits)

    async def read_back(self, entry: CheckpointEntry) -> ReadBack | None:
        path = region_path_of(entry.limits)
        if path is None:
            return None
        region = await asyncio.to_thread(read_region, path)
        if not isinstance(region, Region):
            problem = "the file with its GPU limits is gone" if region is None else region.reason
            return ReadBack(problem=problem)
        return ReadBack(limits=_limits(entry, region.memory_limits, region.core_limits))

    async def resize(self, entry: CheckpointEntry) -> None:
        """Write the region and, for child processes of running ones, the overrides."""
        path = region_path_of(entry.limits)
        if path is None:
            return
        try:
            await asyncio.to_thread(write_limits, path, seed_of(entry.limits.environment))
            await asyncio.to_thread(write_overrides, entry.limits)
        except OSError as error:
            raise UnavailableError(f"{error.filename}: {error.strerror}") from error

    async def end(self, live: Set[PodUid], mounted: Set[str] | None) -> None:
        await self.files.remove_unused(live, mounted)
