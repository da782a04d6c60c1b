"""MPS limits the memory and threads of a container's processes.

`Mps` has a control daemon for each container, `SharedMps` a server for each GPU.
"""

import asyncio
import logging
import math
import re
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from services.node_agent.enforcers.enforcer import Difference, Enforcer, Facts, HeldLimit, ReadBack
from services.node_agent.gpus.driver import SampleDevices
from services.node_agent.gpus.inventory import DeviceSample, Gpu, SharingConfig
from services.node_agent.kubelet.cgroups import read_origin
from services.node_agent.memory_limits.listed_pods import ListedPods, ListPods
from services.node_agent.mps.daemon import (
    ALL_THREADS,
    MpsDaemon,
    MpsLimits,
    MpsTarget,
    StartedDaemon,
)
from services.node_agent.mps.runners import MpsRunner
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from shared.dialects.compute_time import mounted_at
from shared.dialects.hami_core import shares_by_index
from shared.dialects.mps import (
    PIPES,
    held_by_mps,
    memory_limits_mib,
    shared_gpu,
    thread_percent,
)
from shared.model.devices.device import DeviceMode
from shared.model.devices.enforcers import LABELS
from shared.model.errors import LeaseholdError, UnavailableError
from shared.model.events.node_events import ViolationFound, ViolationReason
from shared.model.leases.lease import MIB, Share
from shared.model.names import DeviceUuid, PodUid

logger = logging.getLogger(__name__)

OFF = (
    "MPS holds nothing here: add the component mps, or set --mps of the node agent to private and "
    "--mps-dir of its partitioner (not confirmed on a GPU yet)"
)
SHARED_OFF = (
    "no server of MPS is shared here: add the component mps, and set --mps of the node agent to "
    "shared (not confirmed on a GPU yet)"
)
NOT_TRIED = "whether daemons of MPS can be started is being tried"
NO_RESIZE = (
    "MPS holds running processes to what they started with: create the pod again with the new size"
)
EXCLUSIVE_PROCESS = (
    "the GPU's compute mode is not Default, so that one container's server of MPS would keep all "
    "others out: run nvidia-smi -c DEFAULT, and stop the program that has set it"
)
YOUNG_S = 60.0
"""A daemon that started later is kept: its container may not be recorded yet."""
SAMPLE_S = 2.0
"""How long a list of the processes on the GPUs counts as current."""
MOST_SERVERS = 8
"""That get commands at once: each command is a process."""
_MAJOR = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class MpsReadBack(ReadBack):
    outside: Mapping[DeviceUuid, Sequence[int]] = field(default_factory=dict)
    """PIDs on the node of processes that are no clients of the container's daemon."""


def mps_shares(entry: CheckpointEntry) -> tuple[Share, ...]:
    shares = shares_by_index(entry.lease, entry.allocation.container)
    return tuple(filter(held_by_mps, shares))


def holds_by_mps(entry: CheckpointEntry) -> bool:
    return bool(mps_shares(entry))


def target_of(entry: CheckpointEntry) -> MpsTarget:
    gpu = shared_gpu(mps_shares(entry))
    return MpsTarget(entry.allocation.pod, entry.allocation.container, gpu)


def limits_of(entry: CheckpointEntry) -> MpsLimits:
    shares = mps_shares(entry)
    memory = memory_limits_mib(shares)
    return MpsLimits(
        percent=thread_percent(shares),
        memory_mib={share.device: memory.get(share.device) for share in shares},
    )


class Mps(Enforcer):
    differs_reason = ViolationReason.LIMIT_DIFFERS
    off: ClassVar[str] = OFF
    first_driver: ClassVar[int] = 495
    """The first that limits the memory of clients by commands."""
    facts = Facts(
        name="mps",
        memory="what each process allocates, with its context: several processes add up",
        compute="a part of the SMs for each process: a ceiling, rounded down",
        parts=True,
        not_held=(
            "the sum of a container's processes, memory bandwidth, processes that leave the "
            "directory of their server or change their own variables, and what a "
            "program of user 0 does to its own server; what is seen of it is a violation"
        ),
        needs=(
            "the component mps, which is off by default since no GPU has confirmed it (see "
            "[MPS](mps.md)), the driver R495, and a GPU in compute mode Default; not on GPUs in "
            "MIG mode"
        ),
        resize="no: create the pod again",
        shown="each daemon's limits, its servers and their clients, and NVML's list of processes",
    )

    def __init__(
        self,
        daemons: MpsRunner | None = None,
        *,
        sample: SampleDevices | None = None,
        list_pods: ListPods | None = None,
        proc: Path = Path("/proc"),
    ) -> None:
        self.daemons = daemons
        """None if it is off."""
        self.listed = None if list_pods is None else ListedPods(list_pods)
        self.sample = sample
        self.proc = proc
        self.young_s = YOUNG_S
        self.missing_reason_of_node = NOT_TRIED
        self.wedged: dict[Hashable, Mapping[DeviceUuid, str]] = {}
        """Since when clients hang, by `MpsTarget.server`."""
        self.repairs: dict[MpsTarget, ViolationFound] = {}
        self.probes_due = asyncio.Event()
        """A container has started again: what it ran before may have been killed at work."""
        self.drained: Set[int] = frozenset()
        """PIDs of processes that are to be killed soon, whose work on the GPU was ended."""
        self._sampled: tuple[float, Sequence[DeviceSample]] = (-math.inf, ())

    @property
    def findings(self) -> tuple[ViolationFound, ...]:
        return tuple(self.repairs.values())

    @property
    def faults(self) -> Mapping[DeviceUuid, str]:
        return {device: text for of in self.wedged.values() for device, text in of.items()}

    def missing(self, gpu: Gpu, sharing: SharingConfig) -> str:
        if gpu.mode is DeviceMode.MIG:
            return "instances of MIG hold their memory and cores themselves"
        if self.daemons is None:
            return self.off
        major = _MAJOR.match(gpu.driver)
        if major is None or int(major[0]) < self.first_driver:
            return (
                f"{LABELS[self.facts.name]} needs the driver R{self.first_driver}, and this one is "
                f"{gpu.driver or 'unknown'}"
            )
        if gpu.exclusive_process:
            return EXCLUSIVE_PROCESS
        return self.missing_reason_of_node

    async def find_out(self, gpus: Sequence[Gpu]) -> None:
        if self.daemons is None:
            return
        try:
            self.missing_reason_of_node = await self.daemons.missing_reason()
        except LeaseholdError as error:
            self.missing_reason_of_node = str(error)

    async def prepare(self, entry: CheckpointEntry, *, starting: bool, new: bool) -> None:
        daemons = self.required()
        target = target_of(entry)
        limits = limits_of(entry)
        fence = max(share.fence for share in mps_shares(entry))
        daemon = await daemons.ensure(target, fence=fence, limits=limits)
        pipes = mounted_at(entry.limits, PIPES)
        if pipes is None or pipes.host_path != daemon.pipes:
            raise UnavailableError(
                f"the partitioner has the socket of {target} in {daemon.pipes}, and the container "
                f"mounts {pipes and pipes.host_path}: set --mps-dir of the partitioner to the "
                "directory mps of the agent's --state-dir"
            )
        differences = list(super().audit(entry, _read_back(entry, daemon)))
        if differences:
            raise UnavailableError("; ".join(difference.text for difference in differences))
        has_run = bool(daemon.clients if target.gpu else daemon.servers)
        if starting and has_run:
            self.probes_due.set()

    def wanted(self, entry: CheckpointEntry) -> tuple[HeldLimit, ...]:
        """MiB are rounded down; all devices have one percentage."""
        limits = limits_of(entry)
        return tuple(
            HeldLimit(
                device=share.device,
                memory_bytes=_bytes(limits.memory_mib[share.device]),
                cores_percent=_limit(limits.percent),
            )
            for share in mps_shares(entry)
        )

    async def read_back(self, entry: CheckpointEntry) -> ReadBack | None:
        try:
            samples = await self._samples()  # before the daemon's list, which then has their PIDs
            daemon = await self.required().get(target_of(entry))
        except LeaseholdError as error:  # the partitioner may be restarting, or NVML hang
            return ReadBack(unread=str(error))
        if daemon.problem:
            return ReadBack(problem=daemon.problem)
        outside = await self._outside(entry, daemon, samples)
        return replace(_read_back(entry, daemon), outside=outside)

    def audit(self, entry: CheckpointEntry, read: ReadBack) -> Iterator[Difference]:
        yield from super().audit(entry, read)
        for device, pids in (read.outside if isinstance(read, MpsReadBack) else {}).items():
            yield Difference(
                reason=ViolationReason.MPS_BYPASSED,
                text=(
                    f"processes on GPU {device} are no clients of its server of MPS (PIDs "
                    f"{', '.join(map(str, pids[:5]))} on the node): nothing limits them"
                ),
                device=device,
            )

    async def resize(self, entry: CheckpointEntry) -> None:
        raise UnavailableError(NO_RESIZE)

    async def end(self, live: Set[PodUid], mounted: Set[str] | None) -> None:
        if self.daemons is None:
            return
        try:
            daemons = await self.daemons.list()
        except LeaseholdError as error:  # the partitioner may be restarting
            logger.info("daemons of MPS are not listed: %s", error)
            return
        by_server: dict[Hashable, list[StartedDaemon]] = {}
        for started in daemons:
            by_server.setdefault(started.target.server, []).append(started)
        at_once = asyncio.Semaphore(MOST_SERVERS)
        await asyncio.gather(*(self._end(of, live, at_once) for of in by_server.values()))

    async def _end(
        self, started: Sequence[StartedDaemon], live: Set[PodUid], at_once: asyncio.Semaphore
    ) -> None:
        """All are of one server."""
        daemons = self.required()
        left = len(started)
        async with at_once:
            for daemon in started:
                target = daemon.target
                if target.holder in live or abs(time.time() - daemon.started_at) < self.young_s:
                    continue
                self.repairs.pop(target, None)
                try:
                    await daemons.stop(target, fence=daemon.fence)
                except LeaseholdError as error:
                    logger.warning("%s is not ended: %s", target, error)
                else:
                    left -= 1
            if not left:
                self.wedged.pop(started[0].target.server, None)

    def required(self) -> MpsRunner:
        """Raises UnavailableError if MPS is off."""
        if self.daemons is None:
            raise UnavailableError(self.off)
        return self.daemons

    def holds(self, entry: CheckpointEntry) -> bool:
        name = self.facts.name
        return any(name in (share.memory, share.compute) for share in mps_shares(entry))

    async def _samples(self) -> Sequence[DeviceSample]:
        sampled_at, samples = self._sampled
        now = asyncio.get_running_loop().time()
        if self.sample is not None and now >= sampled_at + SAMPLE_S:
            samples = await self.sample()
            self._sampled = now, samples
        return samples

    async def _outside(
        self, entry: CheckpointEntry, daemon: MpsDaemon, samples: Sequence[DeviceSample]
    ) -> Mapping[DeviceUuid, Sequence[int]]:
        """Return none while pods are not known."""
        try:
            pods = await self.listed.read() if self.listed is not None else {}
        except UnavailableError:
            return {}
        name = entry.allocation.container
        is_claim = entry.lease.claim is not None
        ids = {
            container_id
            for user in entry.lease.users
            if user in pods
            for container_id, of in pods[user].container_ids.items()
            if is_claim or of == name
        }
        held = daemon.clients | {server.pid for server in daemon.servers} | self.drained
        devices = {share.device for share in mps_shares(entry)}
        pids_by_device = {
            sample.device: await asyncio.to_thread(self._pids_of, ids, sample)
            for sample in samples
            if sample.device in devices
        }
        outside = {device: sorted(pids - held) for device, pids in pids_by_device.items()}
        return {device: pids for device, pids in outside.items() if pids}

    def _pids_of(self, ids: Set[str], sample: DeviceSample) -> Set[int]:
        origins = {
            process.pid: read_origin(process.pid, self.proc, reported_at_s=sample.sampled_at_s)
            for process in sample.processes
        }
        return {
            pid
            for pid, origin in origins.items()
            if origin is not None and origin.container_id in ids
        }


class SharedMps(Mps):
    off = SHARED_OFF
    first_driver = 615
    """The first whose servers have namespaces with limits of their own."""
    facts = Facts(
        name="mps-shared",
        memory="what each process allocates, with its context: several processes add up",
        compute="a part of the SMs for each process, beside those of other pods at the same time: "
        "a ceiling, rounded down",
        parts=True,
        not_held=(
            "the sum of a container's processes, memory bandwidth, processes that leave the "
            "directory of their namespace or change their own variables, and faults: a fatal one "
            "of a process ends those of all containers on the GPU"
        ),
        needs=(
            "the component mps with `--mps shared`, which is off by default since no GPU has "
            "confirmed it (see [MPS](mps.md#one-server-for-each-gpu)), the driver R615, a GPU in "
            "compute mode Default, and containers with one GPU and without programs of user 0; "
            "not on GPUs in MIG mode"
        ),
        resize="no: create the pod again",
        shown="each namespace's limits and clients, and NVML's list of processes",
    )


def _read_back(entry: CheckpointEntry, daemon: MpsDaemon) -> MpsReadBack:
    wanted = limits_of(entry).memory_mib
    return MpsReadBack(
        limits=tuple(
            HeldLimit(
                device=device,
                memory_bytes=_bytes(
                    daemon.held_mib(device) if wanted[device] is not None else None
                ),
                cores_percent=_limit(daemon.held_percent()),
            )
            for device in wanted
        )
    )


def _bytes(amount_mib: int | None) -> int | None:
    return None if amount_mib is None else amount_mib * MIB


def _limit(percent: int) -> int:
    return percent if percent < ALL_THREADS else 0
