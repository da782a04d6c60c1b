"""The driver's limits on the node's containers: set before they start, read back, and repaired.

A pod's cgroup exists before its containers' do, so it is limited first. The container's own limit
follows in a hook of the runtime: only that one is shown to programs as the GPU's size.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from services.node_agent.allocate.device_list_strategies import DeviceListStrategies
from services.node_agent.enforcers.enforcer import Difference, HeldLimit, ReadBack
from services.node_agent.files import replace_file
from services.node_agent.gpus.memory_limits import (
    Accounting,
    ForeignLimit,
    LimitError,
    LimitFault,
    LimitTarget,
    MemoryLimit,
)
from services.node_agent.memory_limits.cgroup_tree import parse_process
from services.node_agent.memory_limits.foreign_limits import ForeignLimits
from services.node_agent.memory_limits.hook_program import HookProgram
from services.node_agent.memory_limits.hook_server import HookCall
from services.node_agent.memory_limits.limit_setter import LimitSetter
from services.node_agent.memory_limits.listed_pods import ListedPods, ListPods
from services.node_agent.memory_limits.remote_limits import RemoteLimits
from services.node_agent.memory_limits.specification import check_variables, read_variables
from services.node_agent.metrics import FOREIGN_LIMITS, LIMIT_HOOKS
from services.node_agent.records.checkpoint import Checkpoint
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from shared.model.errors import UNDECODABLE, LeaseholdError, RequestError, UnavailableError
from shared.model.events.node_events import ViolationFound, ViolationReason
from shared.model.leases.lease import MIB, Share, bookings
from shared.model.names import DeviceUuid, NodeName, PodUid

logger = logging.getLogger(__name__)

TRY_S = 30.0
"""Interval of trials whether the driver limits memory."""

LimitSetters = LimitSetter | RemoteLimits


class Wanted(NamedTuple):
    memory_bytes: int
    fence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverReadBack(ReadBack):
    differences: tuple[Difference, ...] = ()


class LateContainer(msgspec.Struct, frozen=True):
    target: LimitTarget
    holder: PodUid
    container: str
    resource: str

    @property
    def key(self) -> tuple[PodUid, str, str]:
        return self.holder, self.container, self.resource


class LimitShortageError(UnavailableError):
    def __init__(self, text: str, used_mib: int) -> None:
        super().__init__(text)
        self.used_mib = used_mib


def limited_shares(entry: CheckpointEntry) -> tuple[Share, ...]:
    shares = entry.lease.shares_of(entry.allocation.container)
    return tuple(share for share in shares if share.memory == "driver")


def pod_limits(entries: Iterable[CheckpointEntry], pod: PodUid) -> dict[DeviceUuid, Wanted]:
    leases = {entry.lease.pod: entry.lease for entry in entries if pod in entry.lease.users}
    wanted: dict[DeviceUuid, Wanted] = {}
    for lease in leases.values():
        shares = [share for share in lease.shares if share.memory == "driver"]
        fences = {share.device: share.fence for share in sorted(shares, key=lambda s: s.fence)}
        for booking in bookings(shares):
            before = wanted.get(booking.device, Wanted(0, 0))
            wanted[booking.device] = Wanted(
                before.memory_bytes + booking.memory_mib * MIB,
                max(before.fence, fences[booking.device]),
            )
    return wanted


def _pod_targets(entries: Sequence[CheckpointEntry]) -> Iterator[tuple[LimitTarget, int]]:
    for pod in dict.fromkeys(pod for entry in entries for pod in entry.lease.users):
        for device, wanted in pod_limits(entries, pod).items():
            yield LimitTarget(device, pod), wanted.fence


def fence_of(entry: CheckpointEntry) -> int:
    return max((share.fence for share in limited_shares(entry)), default=0)


class ContainerLimits:
    def __init__(
        self,
        node: NodeName,
        setter: LimitSetters,
        checkpoint: Checkpoint,
        program: HookProgram,
        *,
        strategies: Callable[[], DeviceListStrategies],
        list_pods: ListPods,
        proc: Path,
        bundles: Sequence[Path],
    ) -> None:
        self.node = node
        self.setter = setter
        self.checkpoint = checkpoint
        self.listed = ListedPods(list_pods)
        self.proc = proc
        self.bundles = bundles
        self.program = program
        self.strategies = strategies
        self.accounting: dict[DeviceUuid, Accounting] = {}
        self.reasons: dict[DeviceUuid, str] = {}
        self.agent_limit_reason = ""
        self._refusals: dict[tuple[PodUid, str], ViolationFound] = {}
        self._started: dict[tuple[PodUid, str], set[tuple[PodUid, str]]] = {}
        self._targets = dict(_pod_targets(checkpoint.entries))
        """With their fences; also of pods that have ended while no agent ran."""
        self._late_file = program.path.with_name("late-memory-limits.json")
        self._late = self._load_late()
        """Containers with `misc` that lost their limit while they ran."""
        self.foreign = ForeignLimits()
        self._logged: set[str] = set()
        self._tried: tuple[frozenset[DeviceUuid], float] = (frozenset(), -math.inf)

    async def find_out(self, devices: Iterable[DeviceUuid]) -> None:
        """The same devices are tried again after `TRY_S`: the driver may have been replaced."""
        present = frozenset(devices)
        now = asyncio.get_running_loop().time()
        tried, tried_at = self._tried
        if present == tried and now < tried_at + TRY_S:
            return
        self._tried = present, now
        limits: dict[DeviceUuid, int] = {}
        for device in sorted(present):
            try:
                driver = await self.setter.accounting(device)
            except LeaseholdError as error:
                self.reasons[device] = str(error)
                passing = isinstance(error, UnavailableError) and not isinstance(error, LimitError)
                if not (passing and device in self.accounting):
                    self.accounting.pop(device, None)
                if str(error) not in self._logged:
                    self._logged.add(str(error))
                    logger.info("memory is not limited by the driver: %s", error)
                continue
            self.accounting[device] = driver.accounting
            self.reasons.pop(device, None)
            await self._note_foreign(device, driver.foreign)
            if driver.agent_limit_mib is not None:
                limits[device] = driver.agent_limit_mib
        self.agent_limit_reason = "; ".join(
            f"the driver limits this agent itself to {limit_mib} MiB of GPU {device}, which would "
            "be reported as its size: remove the limit on the agent's cgroup, or on one above it"
            for device, limit_mib in limits.items()
        )

    async def _note_foreign(self, device: DeviceUuid, limits: Sequence[ForeignLimit]) -> None:
        own = {
            pod
            for entry in self.checkpoint.entries
            if any(share.device == device for share in limited_shares(entry))
            for pod in entry.lease.users
        }
        foreign = [limit for limit in limits if limit.pod not in own]
        FOREIGN_LIMITS.labels(device).set(len(foreign))
        if any(limit.pod is not None for limit in foreign):
            with contextlib.suppress(LeaseholdError):  # their names are shown later
                await self.listed.read()
        for text in self.foreign.replace(device, foreign):
            logger.warning("%s", text)

    # Before the first process

    async def limit_pods(self, entry: CheckpointEntry) -> None:
        """Call it before any of the pods' containers exists.

        Raises LimitError, RequestError or UnavailableError: the pod must not start then.
        """
        if not limited_shares(entry):
            return
        users = entry.lease.users
        if len(users) > 1:
            raise RequestError(
                f"{entry.holder} is used by {len(users)} pods, and the driver limits each pod for "
                "itself: give each pod a ResourceClaim of its own, by a template"
            )
        entries = [*self.checkpoint.entries, entry]
        for pod in users:
            for device, wanted in pod_limits(entries, pod).items():
                await self._ensure(LimitTarget(device, pod), wanted)

    async def start_container(self, call: HookCall) -> None:
        """The container runs nothing of its own yet.

        Raises LeaseholdError with the reason why it must not start.
        """
        entry = self._entry_of(call)
        key = call.holder, call.container
        try:
            pod, container_id = await self._identify(call, entry)
            async with self.checkpoint.changing.hold(call.holder):
                if entry.key not in self.checkpoint.by_key:
                    raise RequestError(f"{entry.holder} has ended meanwhile")
                entry = self.checkpoint.by_key[entry.key]
                self._started.setdefault(key, set()).add((pod, container_id))
                await self._limit_container(entry, pod, container_id)
        except LeaseholdError as error:
            LIMIT_HOOKS.labels("refused").inc()
            self._refusals[call.holder, call.container] = self._violation(
                entry, None, ViolationReason.LIMIT_REFUSED, f"the container did not start: {error}"
            )
            logger.warning(
                "container %s of %s does not start: %s", call.container, call.holder, error
            )
            raise
        LIMIT_HOOKS.labels("limited").inc()
        self._refusals.pop(key, None)
        await self._keep_late(
            {
                target: of
                for target, of in self._late.items()
                if of.key != entry.key or entry.lease.claim is not None
            }
        )
        if entry.lease.claim is None:  # earlier runs of the container have ended
            earlier = self._started.pop(key, set()) - {(pod, container_id)}
            self._started[key] = {(pod, container_id)}
            await self._clear(earlier, entry)

    def _entry_of(self, call: HookCall) -> CheckpointEntry:
        for entry in self.checkpoint.entries:
            allocation = entry.allocation
            if (allocation.pod, allocation.container) != (call.holder, call.container):
                continue
            if limited_shares(entry):
                return entry
        LIMIT_HOOKS.labels("refused").inc()
        raise RequestError(
            f"node {self.node} has given container {call.container} of {call.holder} no memory "
            "that the driver limits: delete the pod"
        )

    async def _identify(self, call: HookCall, entry: CheckpointEntry) -> tuple[PodUid, str]:
        if call.fence != fence_of(entry):
            raise RequestError(
                f"the hook is of the lease with fence {call.fence}, and the present one has "
                f"{fence_of(entry)}: delete the pod"
            )
        path = self.proc / str(call.state.pid) / "cgroup"
        try:
            text = await asyncio.to_thread(path.read_text)
        except OSError as error:
            raise UnavailableError(f"{path} is not readable: {error.strerror}") from error
        pod, container_id = parse_process(text)
        if pod not in entry.lease.users or container_id != call.state.id:
            raise RequestError(
                f"process {call.state.pid} is of container {container_id} of pod {pod}, and the "
                f"runtime starts {call.state.id[:64]} for {entry.holder}"
            )
        variables = await asyncio.to_thread(read_variables, self.bundles, container_id)
        amounts = (share.memory_mib for share in limited_shares(entry))
        check_variables(variables, amounts, entry.limits.environment)
        return pod, container_id

    async def _limit_container(
        self, entry: CheckpointEntry, pod: PodUid, container_id: str
    ) -> None:
        limits = pod_limits(self.checkpoint.entries, pod)
        for share in limited_shares(entry):
            within = limits[share.device]
            await self._ensure(LimitTarget(share.device, pod), within)
            if self._has_own(entry, share.device):
                target = LimitTarget(share.device, pod, container_id)
                await self._ensure(target, Wanted(share.limit_bytes, within.fence))

    def _has_own(self, entry: CheckpointEntry, device: DeviceUuid) -> bool:
        """With `misc`, a limit of one container of a claim would replace the pod's."""
        return entry.lease.claim is None or self.accounting.get(device) is not Accounting.MISC

    async def _ensure(self, target: LimitTarget, wanted: Wanted) -> None:
        """With `misc`, an unset container reads as its pod."""
        self._targets[target] = wanted.fence
        if not target.container_id and _equals(await self.setter.get(target), wanted):
            return
        try:
            limit = await self.setter.set(
                target, fence=wanted.fence, memory_bytes=wanted.memory_bytes
            )
        except LimitError as error:
            if error.fault is not LimitFault.REFUSED:
                raise
            limit = await self.setter.get(target)
            if limit.used_bytes <= wanted.memory_bytes:
                raise
        _check_equal(target, limit, wanted)

    # Running containers

    async def resize(self, entry: CheckpointEntry) -> None:
        """Raises LimitShortageError while more is in use, or another error of the driver.

        Raises UnavailableError if other runs of the container are not seen.
        """
        await self.put_back(entry)
        if entry.lease.claim is None:
            await self._find_ids(entry, entry.lease.pod)

    async def put_back(self, entry: CheckpointEntry) -> None:
        """A container or pod without a cgroup is limited when it starts.

        Raises as `resize` does.
        """
        entries = [*self.checkpoint.entries, entry]  # of a lease, the last one counts
        for pod in entry.lease.users:
            ids = await self._seen_ids(entry, pod)
            for share in limited_shares(entry):
                targets = self._targets_of(entry, share, pod, entries, ids)
                if await self._is_beyond(*targets[0]):
                    targets.reverse()
                for target, wanted in targets:
                    try:
                        await self._ensure(target, wanted)
                    except LimitError as error:
                        if error.fault is not LimitFault.NO_CGROUP:
                            raise

    async def _is_beyond(self, target: LimitTarget, wanted: Wanted) -> bool:
        try:
            return (await self.setter.get(target)).hard_bytes > wanted.memory_bytes
        except LimitError:
            return False

    async def read_back(self, entry: CheckpointEntry) -> DriverReadBack | None:
        """Return None if the pod has no cgroup.

        The kubelet makes it some time before it starts the first container.
        """
        entries = [*self.checkpoint.entries, entry]  # it may have been forgotten meanwhile
        limits: list[HeldLimit] = []
        differences: list[Difference] = []
        unread = ""
        for pod in entry.lease.users:
            ids = await self._seen_ids(entry, pod)
            for share in limited_shares(entry):
                for target, wanted in self._targets_of(entry, share, pod, entries, ids):
                    self._targets[target] = wanted.fence
                    try:
                        limit = await self._read(entry, target)
                    except LimitError as error:
                        if error.fault is not LimitFault.NO_CGROUP:  # not yet, or no more
                            differences.append(_unread(target, error))
                        continue
                    except LeaseholdError as error:  # the partitioner may be restarting
                        unread = str(error)
                        continue
                    if limit.is_none and not self._may_run(entry, ids):
                        continue
                    limits.append(HeldLimit(device=share.device, memory_bytes=limit.hard_bytes))
                    if not _equals(limit, wanted):
                        differences.append(_difference(target, limit, wanted))
        if not (limits or differences or unread):
            return None
        own = {limit.device: limit for limit in limits}  # the container's comes after the pod's
        return DriverReadBack(
            limits=tuple(own.values()), differences=tuple(differences), unread=unread
        )

    async def _read(self, entry: CheckpointEntry, target: LimitTarget) -> MemoryLimit:
        limit = await self.setter.get(target)
        is_misc = self.accounting.get(target.device) is Accounting.MISC
        if limit.is_none and is_misc and target.container_id:
            await self._keep_late({**self._late, target: entry})
        return limit

    async def _keep_late(self, late: dict[LimitTarget, CheckpointEntry]) -> None:
        """Record them before their limits are set again: nothing shows then that they were late."""
        if late.keys() == self._late.keys():
            return
        self._late = late
        targets = [LateContainer(target, *of.key) for target, of in late.items()]
        try:
            await asyncio.to_thread(replace_file, self._late_file, msgspec.json.encode(targets))
        except OSError as error:
            logger.warning("%s is not writable: %s", self._late_file, error.strerror)

    def _load_late(self) -> dict[LimitTarget, CheckpointEntry]:
        try:
            late = msgspec.json.decode(self._late_file.read_bytes(), type=list[LateContainer])
        except (OSError, *UNDECODABLE):
            return {}
        entries = {of.target: self.checkpoint.find(*of.key) for of in late}
        return {target: entry for target, entry in entries.items() if entry is not None}

    def _targets_of(
        self,
        entry: CheckpointEntry,
        share: Share,
        pod: PodUid,
        entries: Iterable[CheckpointEntry],
        ids: Set[str],
    ) -> list[tuple[LimitTarget, Wanted]]:
        within = pod_limits(entries, pod)[share.device]
        own = Wanted(share.limit_bytes, within.fence)
        own_ids = sorted(ids) if self._has_own(entry, share.device) else ()
        containers = (LimitTarget(share.device, pod, container_id) for container_id in own_ids)
        return [(LimitTarget(share.device, pod), within), *((target, own) for target in containers)]

    async def _seen_ids(self, entry: CheckpointEntry, pod: PodUid) -> Set[str]:
        try:
            return await self._find_ids(entry, pod)
        except UnavailableError:
            return frozenset()

    def _may_run(self, entry: CheckpointEntry, ids: Set[str]) -> bool:
        """True also if it cannot be seen whether the container has started."""
        return bool(ids) or entry.lease.claim is not None or bool(self.listed.unread_reason)

    async def _find_ids(self, entry: CheckpointEntry, pod: PodUid) -> Set[str]:
        """Containers that started before this agent did are looked up in the kubelet's list.

        Raises UnavailableError if it cannot be read, or is older than the pod.
        """
        name = entry.allocation.container
        started = self._started.get((entry.allocation.pod, name), ())
        ids = {container_id for of, container_id in started if of == pod}
        if ids or entry.lease.claim is not None:
            return ids
        listed = (await self.listed.read()).get(pod)
        if listed is None:
            raise UnavailableError(
                f"the kubelet does not list pod {pod}, so that the limits of those of its "
                "containers that started before the node agent did are neither compared nor changed"
            )
        return {container_id for container_id, of in listed.container_ids.items() if of == name}

    @property
    def findings(self) -> tuple[ViolationFound, ...]:
        late = (
            self._violation(entry, target.device, ViolationReason.LIMIT_TOO_LATE, _late(target))
            for target, entry in self._late.items()
        )
        foreign = self.foreign.violations(self.node, self.listed.latest)
        return (*self._refusals.values(), *late, *foreign)

    def _violation(
        self,
        entry: CheckpointEntry,
        device: DeviceUuid | None,
        reason: ViolationReason,
        message: str,
    ) -> ViolationFound:
        allocation = entry.allocation
        return ViolationFound(
            node=self.node,
            pod=allocation.pod,
            namespace=allocation.namespace,
            name=allocation.name,
            container=allocation.container,
            reason=reason,
            message=message,
            device=device,
            claim=entry.lease.claim is not None,
        )

    # Ended containers

    async def end(self, live: Set[PodUid]) -> None:
        """`live` are pods and ResourceClaims."""
        ended = {target: fence for target, fence in self._targets.items() if target.pod not in live}
        for target, fence in ended.items():
            await self._clear_target(target, fence)
        late = {target: entry for target, entry in self._late.items() if target.pod in live}
        await self._keep_late(late)
        for key in [key for key in self._started if key[0] not in live]:
            self._started.pop(key)
        for key in [key for key in self._refusals if key[0] not in live]:
            self._refusals.pop(key)

    async def _clear(self, runs: Set[tuple[PodUid, str]], entry: CheckpointEntry) -> None:
        for pod, container_id in runs:
            for share in limited_shares(entry):
                target = LimitTarget(share.device, pod, container_id)
                await self._clear_target(target, self._targets.get(target, share.fence))

    async def _clear_target(self, target: LimitTarget, fence: int) -> None:
        """The limit of a newer lease stays."""
        self._targets[target] = fence
        try:
            await self.setter.clear(target, fence=fence)
        except LeaseholdError as error:
            logger.info("the limit on %s is not cleared: %s", target, error)
            if not (isinstance(error, LimitError) and error.fault is LimitFault.OUTDATED):
                return
        self._targets.pop(target, None)


def _late(target: LimitTarget) -> str:
    return (
        f"{target} has a limit that was set after it had started: what it had allocated before is "
        "not counted; restart it"
    )


def _unread(target: LimitTarget, error: LimitError) -> Difference:
    is_gap = error.fault is LimitFault.CHAIN_BROKEN
    return Difference(
        reason=ViolationReason.LIMIT_CHAIN_BROKEN if is_gap else ViolationReason.LIMIT_MISSING,
        text=f"the driver: {error}",
        device=target.device,
    )


def _difference(target: LimitTarget, limit: MemoryLimit, wanted: Wanted) -> Difference:
    return Difference(
        reason=ViolationReason.LIMIT_MISSING if limit.is_none else ViolationReason.LIMIT_DIFFERS,
        text=(
            f"the driver has {_described(limit)} for {target} instead of "
            f"{wanted.memory_bytes // MIB} MiB"
        ),
        device=target.device,
    )


def _equals(limit: MemoryLimit, wanted: Wanted) -> bool:
    return limit.hard_bytes == wanted.memory_bytes and limit.soft_bytes == 0


def _check_equal(target: LimitTarget, limit: MemoryLimit, wanted: Wanted) -> None:
    if not _equals(limit, wanted):
        used_mib = -(-limit.used_bytes // MIB)
        raise LimitShortageError(
            f"the driver keeps {target} at {_described(limit)} instead of "
            f"{wanted.memory_bytes // MIB} MiB, while {used_mib} MiB are in use",
            used_mib,
        )


def _described(limit: MemoryLimit) -> str:
    return "no limit" if limit.is_none else f"{limit.hard_bytes // MIB} MiB"
