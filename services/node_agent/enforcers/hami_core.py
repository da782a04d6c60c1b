"""HAMi-core: a library in the container that holds it to the limits in its region file."""

import asyncio
from collections.abc import Set

from services.node_agent.enforcers.enforcer import Enforcer, Facts
from services.node_agent.gpus.inventory import Gpu, SharingConfig
from services.node_agent.isolation.container_files import ContainerFiles
from services.node_agent.isolation.region_image import region_path_of, seed_of
from services.node_agent.isolation.region_writer import write_limits, write_overrides
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from shared.model.errors import UnavailableError
from shared.model.names import PodUid

NO_LIBRARY = (
    "HAMi-core's library is missing or unusable on its node, so that limits would not be enforced"
)
NOT_MEASURED = (
    "the driver does not report its memory, as it is the host's: limits would not be enforced, and "
    "pods get it whole or without a limit, unless the agent's --unified-memory-mib says what to "
    "share"
)


class HamiCore(Enforcer):
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

    async def resize(self, entry: CheckpointEntry) -> None:
        """Write the region and, for child processes of running ones, the overrides.

        A missing region gets them when it is made.
        """
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
