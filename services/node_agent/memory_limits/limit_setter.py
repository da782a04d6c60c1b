"""Sets, gets and clears the driver's limits for the node's unprivileged agent.

A request names no directory. Of each pod the highest fence counts, also after a restart: an agent
that is late cannot raise what a newer lease limits.
"""

import asyncio
import logging
import os
import re
import threading
from collections.abc import Iterator, Set
from pathlib import Path
from typing import NamedTuple

import msgspec

from services.node_agent.files import replace_file
from services.node_agent.gpus.memory_limits import (
    UNLIMITED,
    Accounting,
    DriverAccounting,
    ForeignLimit,
    LimitError,
    LimitFault,
    LimitTarget,
    MemoryLimit,
)
from services.node_agent.gpus.nvml.memory_limits import NvmlMemoryLimits
from services.node_agent.kubelet.cgroups import parse_cgroup
from services.node_agent.memory_limits.cgroup_tree import CgroupTree, has_dmem
from services.node_agent.memory_limits.limit_trial import try_limits
from shared.model.bounds import MOST_MIB
from shared.model.errors import UNDECODABLE, LeaseholdError, RequestError, UnavailableError
from shared.model.names import DeviceUuid, PodUid

logger = logging.getLogger(__name__)

MIB = 1 << 20
MOST_FENCES = 4096
MOST_FOREIGN = 16
_POD = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}")
_CONTAINER_ID = re.compile(r"[0-9a-f]{64}")


class _Place(NamedTuple):
    path: Path
    inode: int


class LimitSetter:
    def __init__(
        self,
        driver: NvmlMemoryLimits,
        tree: CgroupTree,
        *,
        fences: Path,
        proc: Path = Path("/proc"),
    ) -> None:
        self.driver = driver
        self.tree = tree
        self.proc = proc
        self.refused_fences = 0
        self._file = fences
        self._fences: dict[str, int] | None = None
        """None until they are read."""
        self._changing = threading.Lock()
        """Limits of several pods are set at once."""
        self._accounting: dict[DeviceUuid, Accounting] = {}
        self._trying = asyncio.Lock()
        """Trials of all GPUs have the same cgroup."""

    async def set(self, target: LimitTarget, *, fence: int, memory_bytes: int) -> MemoryLimit:
        """Return what the driver has after that, which may be an earlier limit.

        Raises LimitError with its fault, RequestError or UnavailableError.
        """
        if not 0 < memory_bytes <= MOST_MIB * MIB:
            raise RequestError(f"a limit cannot be {memory_bytes} bytes")
        place = await asyncio.to_thread(self._find, target)
        await asyncio.to_thread(self._raise_fence, target, fence)
        try:
            await self.driver.set(target.device, place.path, memory_bytes)
        except LimitError as error:
            if error.fault is LimitFault.NO_CGROUP:
                await asyncio.to_thread(self._check_chain, place.path)
            raise
        return await self._read_back(target, place)

    async def get(self, target: LimitTarget) -> MemoryLimit:
        place = await asyncio.to_thread(self._find, target)
        return await self._read_back(target, place)

    async def clear(self, target: LimitTarget, *, fence: int) -> MemoryLimit:
        """With `misc` an entry would outlive its cgroup, and might limit another one."""
        try:
            place = await asyncio.to_thread(self._find, target)
        except UnavailableError:
            await asyncio.to_thread(self._forget_ended)
            return MemoryLimit(hard_bytes=UNLIMITED)
        await asyncio.to_thread(self._raise_fence, target, fence)
        await self.driver.set(target.device, place.path, UNLIMITED)
        return await self._read_back(target, place)

    async def accounting(
        self, device: DeviceUuid, *, agent_pid: int | None = None
    ) -> DriverAccounting:
        """Raises LimitError or UnavailableError with the reason if the driver sets no limits."""
        if device not in self._accounting:
            async with self._trying:
                accounting = await try_limits(self.driver, self.tree, device)
            self._accounting[device] = accounting
            logger.info("the driver limits memory of %s by %s", device, accounting)
        limit = await self._limit_of_process(device, agent_pid or os.getpid())
        return DriverAccounting(
            self._accounting[device],
            None if limit is None else limit.hard_bytes // MIB,
            await self._list_foreign(device),
        )

    async def _list_foreign(self, device: DeviceUuid) -> tuple[ForeignLimit, ...]:
        own = await asyncio.to_thread(self._limited_pods, device)
        cgroups = await asyncio.to_thread(lambda: list(self.tree.list_cgroups(own)))
        limits = await self.driver.list(device, cgroups)
        own = await asyncio.to_thread(self._limited_pods, device)  # others may start meanwhile
        is_misc = self._accounting[device] is Accounting.MISC
        foreign = []
        for path, limit in limits.items():
            if limit is None or limit.is_none:
                continue
            is_inherited = limit == limits.get(path.parent) if is_misc else not has_dmem(path)
            if is_inherited:
                continue
            pod, _ = parse_cgroup(f"0::/{path.relative_to(self.tree.root)}")
            if pod is not None and pod in own:
                continue
            foreign.append(
                ForeignLimit(
                    cgroup=os.fsencode(path).decode(errors="replace"),
                    hard_bytes=limit.hard_bytes,
                    soft_bytes=limit.soft_bytes,
                    pod=pod,
                )
            )
        return tuple(foreign[:MOST_FOREIGN])

    def _limited_pods(self, device: DeviceUuid) -> Set[PodUid]:
        return {pod for of, pod in map(_parts, self._load()) if of == device}

    async def _read_back(self, target: LimitTarget, place: _Place) -> MemoryLimit:
        if self._accounting.get(target.device) is Accounting.DMEM:
            await asyncio.to_thread(self._check_chain, place.path)
        try:
            limit = await self.driver.get(target.device, place.path)
        except LimitError as error:
            if error.fault is not LimitFault.NOT_SUPPORTED:
                raise
            limit = MemoryLimit(hard_bytes=UNLIMITED)  # misc: there is none up to the root
        if _inode_of(place.path) != place.inode:
            raise UnavailableError(f"{place.path} was removed meanwhile: its container has ended")
        return limit

    def _check_chain(self, path: Path) -> None:
        """Raise LimitError if the kernel limits nothing there: reading shows the cgroup above."""
        gap = self.tree.first_gap(path)
        if gap is not None and path.is_dir():
            raise LimitError(
                LimitFault.CHAIN_BROKEN,
                f"cgroup {gap} has no files of the controller dmem: write +dmem to "
                f"{gap.parent}/cgroup.subtree_control, and find out what removed it",
            )

    def _find(self, target: LimitTarget) -> _Place:
        if not _POD.fullmatch(target.pod):
            raise RequestError(f"{target.pod!r} is not the UID of a pod")
        if not target.container_id:
            path = self.tree.pod_directory(target.pod)
        elif _CONTAINER_ID.fullmatch(target.container_id):
            path = self.tree.container_directory(target.pod, target.container_id)
        else:
            raise RequestError(f"{target.container_id!r} is not the ID of a container")
        return _Place(path, _inode_of(path))

    def _raise_fence(self, target: LimitTarget, fence: int) -> None:
        """Record a fence before the limit is set. Raises LimitError if a higher one is known."""
        key = f"{target.device}/{target.pod}"
        with self._changing:
            fences = self._load()
            highest = fences.get(key, -1)
            if fence < highest:
                self.refused_fences += 1
                raise LimitError(
                    LimitFault.OUTDATED,
                    f"the limit on {target} is of fence {highest}, and the request's is {fence}: "
                    "another agent has set it for a newer lease",
                )
            if fence > highest:
                self._save({**fences, key: fence})

    def _forget_ended(self) -> None:
        with self._changing:
            fences = self._load()
            living = self._living(fences)
            if living != fences:
                self._save(living)

    def _living(self, fences: dict[str, int]) -> dict[str, int]:
        return {key: fence for key, fence in fences.items() if self._exists(key)}

    def _exists(self, key: str) -> bool:
        try:
            self.tree.pod_directory(_parts(key)[1])
        except LeaseholdError:
            return False
        return True

    def _load(self) -> dict[str, int]:
        if self._fences is None:
            try:
                self._fences = msgspec.json.decode(self._file.read_bytes(), type=dict[str, int])
            except FileNotFoundError:
                self._fences = {}
            except (OSError, *UNDECODABLE) as error:
                raise UnavailableError(
                    f"the fences in {self._file} are unreadable: {error}"
                ) from error
        return self._fences

    def _save(self, fences: dict[str, int]) -> None:
        if len(fences) > MOST_FENCES:
            fences = self._living(fences)
        if len(fences) > MOST_FENCES:
            raise UnavailableError(f"there are fences of {MOST_FENCES} pods and GPUs already")
        try:
            replace_file(self._file, msgspec.json.encode(fences))
        except OSError as error:
            raise UnavailableError(f"{self._file} is not writable: {error.strerror}") from error
        self._fences = fences

    async def _limit_of_process(self, device: DeviceUuid, pid: int) -> MemoryLimit | None:
        for path in await asyncio.to_thread(lambda: list(self._cgroups_of(pid))):
            try:
                limit = await self.driver.get(device, path)
            except LimitError:
                continue
            if not limit.is_none:
                return limit
        return None

    def _cgroups_of(self, pid: int) -> Iterator[Path]:
        try:
            text = (self.proc / str(pid) / "cgroup").read_text()
            pod, container_id = parse_cgroup(text)
            if pod is not None and container_id:
                path = self.tree.container_directory(pod, container_id)
            else:
                path = self.tree.root / text.partition("::/")[2].strip()
        except (OSError, LeaseholdError):
            return
        if ".." not in path.parts and path.is_dir():
            yield from (level for level in (path, *path.parents) if self.tree.root in level.parents)


def _parts(key: str) -> tuple[DeviceUuid, PodUid]:
    device, _, pod = key.rpartition("/")
    return DeviceUuid(device), PodUid(pod)


def _inode_of(path: Path) -> int:
    try:
        return path.stat(follow_symlinks=False).st_ino
    except OSError:
        return -1
