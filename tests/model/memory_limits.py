"""Memory that the driver limits on the model's nodes: the driver, cgroups, partitioner and hooks.

Limits are in the driver alone: a reboot or a reload removes them. A cgroup is `/POD`, or
`/POD/CONTAINER_ID` below it.
"""

import shutil
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.node_agent.allocate.device_list_strategies import DeviceListStrategy
from services.node_agent.enforcers.driver import DriverLimits
from services.node_agent.enforcers.exclusive import Exclusive
from services.node_agent.enforcers.hami_core import HamiCore
from services.node_agent.enforcers.mig import Mig
from services.node_agent.enforcers.mps import OFF, Mps
from services.node_agent.enforcers.table import Enforcers
from services.node_agent.gpus.inventory import Gpu, SharingConfig
from services.node_agent.gpus.memory_limits import (
    TOO_OLD,
    UNLIMITED,
    Accounting,
    LimitError,
    LimitFault,
    LimitTarget,
    MemoryLimit,
)
from services.node_agent.memory_limits.cgroup_tree import CgroupTree
from services.node_agent.memory_limits.container_limits import ContainerLimits, fence_of
from services.node_agent.memory_limits.hook_program import HookProgram
from services.node_agent.memory_limits.hook_server import HookCall
from services.node_agent.memory_limits.limit_setter import LimitSetter, _Place
from services.node_agent.memory_limits.remote_limits import RemoteLimits
from services.node_agent.partition.partition_protocol import (
    AccountingReply,
    AccountingRequest,
    LimitReply,
    LimitRequest,
)
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from shared.model.errors import RequestError, UnavailableError
from shared.model.leases.lease import MIB
from shared.model.names import DeviceUuid, PodUid

if TYPE_CHECKING:
    from tests.model.mig import PartitionerProcess
    from tests.model.node import Node

Cgroup = tuple[DeviceUuid, Path]
OTHER_CGROUP = "game.service"
"""Of another program, which may limit it."""
OTHER_BYTES = 4 * MIB


def cgroup_of(pod: PodUid, container_id: str = "") -> Path:
    return Path("/") / pod / container_id


class LimitDriver:
    """The part of a node's driver that limits memory, as NVML shows it."""

    def __init__(
        self, accounting: Accounting, *, is_old: bool, used_mib: Callable[[DeviceUuid, str], int]
    ) -> None:
        self.accounting = accounting
        self.is_old = is_old
        """It is the last driver that sets no limits."""
        self.used_mib = used_mib
        """Of a pod."""
        self.limits: dict[Cgroup, int] = {}
        self.last_set: dict[Cgroup, int] = {}
        """Limits that have vanished included."""
        self.limited_by_others: set[DeviceUuid] = set()
        """Devices of which another program limits its cgroup."""
        self.keeps_limits = False
        """It lowers none, whatever is in use."""

    def lose(self, device: DeviceUuid | None = None) -> None:
        """Lose the limits of a device, as when nothing has it open, or of all."""
        self.limits = {
            key: size for key, size in self.limits.items() if device not in {None, key[0]}
        }

    async def set(self, device: DeviceUuid, cgroup: Path, hard_bytes: int) -> None:
        """Set a limit.

        One that is not lowered, as more is in use, is ignored with `dmem`, and refused with `misc`.
        """
        self._check_version()
        key = device, cgroup
        if hard_bytes == UNLIMITED:
            self.limits.pop(key, None)
            self.last_set.pop(key, None)
            return
        counts = self.accounting is Accounting.DMEM or key in self.limits
        is_kept = self.keeps_limits and hard_bytes < self.limits.get(key, 0)
        if is_kept or (counts and hard_bytes < self._used_bytes(device, cgroup)):
            if self.accounting is Accounting.MISC:
                raise LimitError(LimitFault.REFUSED, "it refuses the limit")
            return
        self.limits[key] = hard_bytes
        self.last_set[key] = hard_bytes

    async def get(self, device: DeviceUuid, cgroup: Path) -> MemoryLimit:
        self._check_version()
        hard_bytes = self.limits.get((device, cgroup))
        if self.accounting is Accounting.MISC:
            hard_bytes = self._nearest(device, cgroup)
            if hard_bytes is None:
                raise LimitError(LimitFault.NOT_SUPPORTED, "it does not support limits there")
        used_bytes = self._used_bytes(device, cgroup)
        return MemoryLimit(hard_bytes=hard_bytes or UNLIMITED, used_bytes=used_bytes)

    async def list(
        self, device: DeviceUuid, cgroups: Sequence[Path]
    ) -> dict[Path, MemoryLimit | None]:
        """Return the limits of cgroups that are no pods'."""
        self._check_version()
        limit = MemoryLimit(hard_bytes=OTHER_BYTES)
        is_limited = device in self.limited_by_others
        return {path: limit for path in cgroups if is_limited and path.name == OTHER_CGROUP}

    def held_mib(self, device: DeviceUuid, pod: PodUid, container_id: str) -> int | None:
        """Return what a container can have of a device, or None if nothing limits it."""
        own = cgroup_of(pod, container_id)
        if self.accounting is Accounting.MISC:
            nearest = self._nearest(device, own)
            return None if nearest is None else nearest // MIB
        levels = (self.limits.get((device, level)) for level in (own, own.parent))
        return min((size // MIB for size in levels if size is not None), default=None)

    def has_own(self, device: DeviceUuid, pod: PodUid, container_id: str) -> bool:
        """Whether a container has a limit of its own, which is shown in it as the device's size."""
        return (device, cgroup_of(pod, container_id)) in self.limits

    def last_mib(self, device: DeviceUuid, pod: PodUid, container_id: str) -> int | None:
        """Return the last limit that was set, also if it has vanished; or None."""
        own = cgroup_of(pod, container_id)
        size = self.last_set.get((device, own), self.last_set.get((device, own.parent)))
        return None if size is None else size // MIB

    def _nearest(self, device: DeviceUuid, cgroup: Path) -> int | None:
        levels = (self.limits.get((device, level)) for level in (cgroup, *cgroup.parents))
        return next((size for size in levels if size is not None), None)

    def _used_bytes(self, device: DeviceUuid, cgroup: Path) -> int:
        return self.used_mib(device, cgroup.parts[1]) * MIB

    def _check_version(self) -> None:
        if self.is_old:
            raise LimitError(LimitFault.TOO_OLD, TOO_OLD)


class _Tree(CgroupTree):
    """Has no gaps, and no directories of pods."""

    def first_gap(self, directory: Path) -> Path | None:
        return None


class ModelSetter(LimitSetter):
    """The partitioner's setter. A kubelet says which cgroups there are."""

    def __init__(self, node: "Node") -> None:
        root = node.folder / f"{node.name}-cgroups"
        super().__init__(
            node.limit_driver,  # type: ignore[arg-type]
            _Tree(root),
            fences=files_of(node) / "fences.json",
            proc=root,
        )
        self.kubelet = node.kubelet

    def _find(self, target: LimitTarget) -> _Place:
        containers = self.kubelet.containers_of(target.pod)
        if containers is None or target.container_id not in {"", *containers}:
            raise LimitError(LimitFault.NO_CGROUP, f"{target} has no cgroup")
        return _Place(cgroup_of(target.pod, target.container_id), -1)

    def _exists(self, key: str) -> bool:
        return self.kubelet.containers_of(PodUid(key.rpartition("/")[2])) is not None


class LimitClient(RemoteLimits):
    """The agent's client of the partitioner, which may set no limits for a while."""

    def __init__(self, partitioner: "PartitionerProcess") -> None:
        super().__init__(Path("unused"))
        self.partitioner = partitioner
        self.fails = False

    async def accounting(self, device: DeviceUuid) -> Any:
        self._check()
        if self.partitioner.is_changing(device):
            raise UnavailableError("no reply of the partitioner in time")
        request = AccountingRequest(device)
        return (await self.partitioner.exchange(request, AccountingReply, self.timeout_s)).found

    async def _limit(self, request: LimitRequest) -> MemoryLimit:
        self._check()
        return (await self.partitioner.exchange(request, LimitReply, self.timeout_s)).limit

    def _check(self) -> None:
        if self.fails:
            raise UnavailableError("no partitioner responds")


class ModelProgram(HookProgram):
    """The hooks that CDI files name; they stay on the host when the agent restarts."""

    def __init__(self, node: "Node") -> None:
        super().__init__(files_of(node), Path("unused"))
        self.fences: dict[tuple[PodUid, str], int] = {}

    async def install(self) -> None:
        self.missing_reason = ""

    async def write(self, holder: PodUid, container: str, fence: int) -> None:
        self.fences[holder, container] = fence

    async def remove_others(self, live: Any) -> None:
        self.fences = {key: fence for key, fence in self.fences.items() if key[0] in live}


class ModelContainerLimits(ContainerLimits):
    """The agent's limits. What /proc and the bundle would show of a process is in its call."""

    def __init__(self, node: "Node", checkpoint: Any) -> None:
        super().__init__(
            node.name,
            node.limit_client,
            checkpoint,
            node.hook_program,
            strategies=lambda: (DeviceListStrategy.CDI_CRI,),
            list_pods=node.kubelet.list_pods,
            proc=Path("unused"),
            bundles=(),
        )
        self.kubelet = node.kubelet

    async def _identify(self, call: HookCall, entry: CheckpointEntry) -> tuple[PodUid, str]:
        pod = PodUid(call.state.bundle)
        if call.fence != fence_of(entry) or pod not in entry.lease.users:
            raise RequestError(f"the hook is of {pod} and fence {call.fence}")
        return pod, call.state.id

    async def end(self, live: Set[PodUid]) -> None:
        """Clear what has ended; a real kubelet lists the pods that use a claim."""
        await super().end(live | self.kubelet.consumers())


class ModelHamiCore(HamiCore):
    """HAMi-core: limits that are written hold at once."""

    def __init__(self, node: "Node", files: Any) -> None:
        super().__init__(files)
        self.kubelet = node.kubelet

    def missing(self, gpu: Gpu, sharing: SharingConfig) -> str:
        return ""

    async def resize(self, entry: CheckpointEntry) -> None:
        record = self.kubelet.records.get(entry.allocation.pod)
        if record is not None and record.given is not None:
            record.given = dict(entry.limits.environment)

    async def read_back(self, entry: CheckpointEntry) -> None:
        """Return None: nothing else changes them."""


class ModelMps(Mps):
    """MPS, which is there for replicas only: what it was told for a container holds."""

    def missing(self, gpu: Gpu, sharing: SharingConfig) -> str:
        by_mps = sharing.replicas is not None and sharing.replicas.strategy == "mps"
        return "" if by_mps else OFF

    async def prepare(self, entry: CheckpointEntry, *, starting: bool, new: bool) -> None:
        """There is no daemon."""

    async def read_back(self, entry: CheckpointEntry) -> None:
        """Return None: nothing else changes them."""

    async def end(self, live: Set[PodUid], mounted: Set[str] | None) -> None:
        """There is no daemon."""


def model_enforcers(node: "Node", files: Any, limits: ContainerLimits) -> Enforcers:
    library = ModelHamiCore(node, files)
    return Enforcers((Exclusive(), Mig(), DriverLimits(limits), ModelMps(), library))


def make_cgroups(node: "Node") -> None:
    """Make the cgroups that are no pods', and remove the files of an earlier run."""
    root = node.folder / f"{node.name}-cgroups"
    (root / OTHER_CGROUP).mkdir(parents=True, exist_ok=True)
    is_dmem = node.limit_driver.accounting is Accounting.DMEM
    (root / "cgroup.subtree_control").write_text("dmem misc" if is_dmem else "misc")
    shutil.rmtree(files_of(node), ignore_errors=True)
    files_of(node).mkdir()


def files_of(node: "Node") -> Path:
    """Return the directory for what the agent and its partitioner keep about limits."""
    return node.folder / f"{node.name}-limits"
