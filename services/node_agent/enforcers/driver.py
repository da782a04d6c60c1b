"""The driver limits the memory of cgroups from R615 on."""

from collections.abc import Iterator, Sequence, Set

from services.node_agent.allocate.device_list_strategies import DeviceListStrategy
from services.node_agent.enforcers.enforcer import Difference, Enforcer, Facts, ReadBack
from services.node_agent.gpus.inventory import Gpu, SharingConfig
from services.node_agent.memory_limits.container_limits import (
    ContainerLimits,
    DriverReadBack,
    fence_of,
)
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from shared.model.devices.device import DeviceMode
from shared.model.events.node_events import ViolationFound
from shared.model.names import PodUid

NO_PARTITIONER = (
    "the node agent has no partitioner, which sets the driver's limits on memory: add the "
    "component memory-limits"
)
NO_CDI = (
    "the container runtime is not known to have CDI, by which it calls the hook that limits a "
    "container: use containerd 2 or CRI-O, or set --device-list-strategy cdi-cri"
)
NOT_TRIED = "whether the driver limits memory is being tried"


class DriverLimits(Enforcer):
    is_exact = True
    facts = Facts(
        name="driver",
        memory="everything but managed memory",
        compute="",
        parts=True,
        not_held="managed memory, which counts as the host's: limit the pod's memory",
        needs=(
            "the driver R615, cgroups of version 2, a runtime with CDI, and the component "
            "memory-limits; not on GPUs in MIG mode"
        ),
        resize="memory at once; not below what is in use",
        shown="the driver's limit of each pod and container, read back every 30 s",
    )

    def __init__(self, limits: ContainerLimits | None = None) -> None:
        self.limits = limits

    def missing(self, gpu: Gpu, sharing: SharingConfig) -> str:
        if self.limits is None:
            return NO_PARTITIONER
        if DeviceListStrategy.CDI_CRI not in self.limits.strategies():
            return NO_CDI
        if self.limits.program.missing_reason:
            return self.limits.program.missing_reason
        if gpu.uuid in self.limits.accounting:
            return self.limits.foreign.reason(gpu.uuid)
        return self.limits.reasons.get(gpu.uuid, NOT_TRIED)

    async def find_out(self, gpus: Sequence[Gpu]) -> None:
        if self.limits is not None:
            await self.limits.program.install()
            parts = [gpu.uuid for gpu in gpus if gpu.mode is not DeviceMode.MIG and not gpu.fault]
            await self.limits.find_out(parts)

    def unready_reason(self) -> str:
        return "" if self.limits is None else self.limits.agent_limit_reason

    async def prepare(self, entry: CheckpointEntry, *, starting: bool, new: bool) -> None:
        if self.limits is None:
            return
        holder = entry.allocation.pod
        await self.limits.program.write(holder, entry.allocation.container, fence_of(entry))
        if starting or entry.lease.claim is not None:  # the pod's cgroup exists by now
            await self.limits.limit_pods(entry)
        if not (starting or new):
            await self.limits.put_back(entry)

    async def resize(self, entry: CheckpointEntry) -> None:
        if self.limits is not None:
            await self.limits.resize(entry)

    async def read_back(self, entry: CheckpointEntry) -> ReadBack | None:
        return None if self.limits is None else await self.limits.read_back(entry)

    def audit(self, entry: CheckpointEntry, read: ReadBack) -> Iterator[Difference]:
        """Reading has compared the limits of pods, too."""
        yield from read.differences if isinstance(read, DriverReadBack) else ()

    @property
    def findings(self) -> tuple[ViolationFound, ...]:
        return () if self.limits is None else self.limits.findings

    async def end(self, live: Set[PodUid], mounted: Set[str] | None) -> None:
        if self.limits is not None:
            await self.limits.program.remove_others(live)
            await self.limits.end(live)
