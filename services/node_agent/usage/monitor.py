"""Scans the usage of devices periodically, reports violations, and restores altered limits."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from msgspec import structs
from prometheus_client import Metric
from prometheus_client.registry import Collector

from services.node_agent.enforcers.limit_audit import LimitAudit, ReadKey, ReadShare
from services.node_agent.gpus.driver import SampleDevices
from services.node_agent.isolation.region import Region
from services.node_agent.isolation.region_reader import read_region
from services.node_agent.isolation.region_writer import identify, seed_region
from services.node_agent.kubelet.cgroups import processes_of, read_origin
from services.node_agent.kubelet.pods import (
    ClaimHolding,
    ContainerDevices,
    KubeletPod,
    ProcessOrigin,
)
from services.node_agent.mig.instances import ListInstances, MigInstance
from services.node_agent.node import Node
from services.node_agent.usage.attribution import AttributedProcess, living_pids
from services.node_agent.usage.container_views import ContainerViews, ExemptNamespaces
from services.node_agent.usage.idle_shares import IdleShares, LastUseFile
from services.node_agent.usage.leased_containers import (
    ContainerKey,
    LeasedContainer,
    Regions,
    Scan,
    leased_containers,
)
from services.node_agent.usage.measurements import MeasuredContainer
from services.node_agent.usage.report_limits import ReportLimits
from services.node_agent.usage.snapshot import UsageSnapshot, build_snapshot
from services.node_agent.usage.usage_metrics import usage_metrics
from services.node_agent.usage.violations import overruns
from services.node_agent.usage.visible_gpus import (
    NodeView,
    unleased_views,
    visibility_violations,
)
from shared.model.bounds import MOST_MIB, cut
from shared.model.clock import until_tick
from shared.model.devices.device import XidEvent
from shared.model.errors import LeaseholdError
from shared.model.events.node_events import ViolationFound, ViolationKey
from shared.model.events.request_reply import UsageReply
from shared.model.leases.lease import (
    MIB,
    MOST_PROCESSES,
    ProcessUse,
    ShareKey,
    ShareMeasurement,
)
from shared.model.names import DeviceUuid, PodUid

logger = logging.getLogger(__name__)

T = TypeVar("T")
D = TypeVar("D")

MAX_QUEUED = 256
SCAN_S = 5.0
"""Interval of scans of processes and memory: use beyond a lease is noticed this late, at most."""
REPORT_AGAIN_S = 300.0
"""Interval of reports of an ongoing violation."""
ALL_CORES = 100
LASTING_S = 30.0
"""The library looks for a dead holder of its lock after 10 s: what lasts longer stays so."""
MAX_UNLISTED = 3
"""A container that the kubelet's pods do not have is a sandbox."""
_LOCK = "lock"
_SLOT = "slot"
_NO_PID = "no pid"


class RegionSymptoms:
    def __init__(self) -> None:
        self._since: dict[tuple[ContainerKey, str, int], float] = {}

    def observe(
        self,
        regions: Regions,
        living: Mapping[ContainerKey, Set[int]] | None,
        now: float,
    ) -> tuple[dict[ContainerKey, str], frozenset[ContainerKey]]:
        """`now` is in seconds of a steady clock.

        `living` has the PIDs of each container's processes in its own namespace, if known.
        """
        seen = [
            (key, what, number)
            for key, region in regions.items()
            if isinstance(region, Region)
            for what, number in _symptoms(
                region, None if living is None else living.get(key, frozenset())
            )
        ]
        self._since = {symptom: self._since.get(symptom, now) for symptom in seen}
        lasting = [symptom for symptom, since in self._since.items() if now - since >= LASTING_S]
        return (
            {key: _hangs(what, number) for key, what, number in lasting if what != _NO_PID},
            frozenset(key for key, what, _ in lasting if what == _NO_PID),
        )


def _symptoms(region: Region, living: Set[int] | None) -> Iterator[tuple[str, int]]:
    if region.locked:
        yield _LOCK, region.lock_owner
    for slot in region.slots:
        if slot.torn:
            yield _SLOT, slot.index
    capped = [at for at, percent in enumerate(region.core_limits) if 0 < percent < ALL_CORES]
    for slot in region.processes(living):
        if slot.host_pid == 0 and any(slot.total[position] for position in capped):
            yield _NO_PID, slot.pid


def _hangs(what: str, number: int) -> str:
    if what == _LOCK:
        holder = f"PID {number} in the container" if number else "a process that was killed"
        return f"HAMi-core's lock has been held for more than {LASTING_S:g} s by {holder}"
    return f"record {number} of HAMi-core's file has been half-written for over {LASTING_S:g} s"


def share_measurements(
    containers: Iterable[MeasuredContainer],
    idle_since: Mapping[ShareKey, float],
    read: Mapping[ReadKey, ReadShare],
) -> Iterator[ShareMeasurement]:
    """Memory is rounded up to MiB."""
    for use in containers:
        lease = use.container.lease
        beyond = {device: text for _, text, device in overruns(use)}
        for share in use.shares:
            device = share.share.device
            held = read.get((lease.pod, use.container.name, device), ReadShare())
            unread = f"what holds it is not known now: {held.unread}" if held.unread else ""
            texts = held.difference, unread, beyond.get(device)
            yield ShareMeasurement(
                pod=lease.pod,
                namespace=lease.namespace,
                name=lease.name,
                container=use.container.name,
                device=device,
                position=share.share.mig.position if share.share.mig else None,
                memory_mib=-(-share.measured_bytes // MIB) if share.is_measured else None,
                cores_percent=share.cores_percent,
                processes=share.processes,
                running=process_uses(share.running),
                idle_since=idle_since.get(use.key_of(share)),
                held_memory_mib=None if held.memory_bytes is None else held.memory_bytes // MIB,
                held_cores_percent=held.cores_percent,
                held_difference=cut("; ".join(filter(None, texts))),
                read_back_at=held.at,
            )


def process_uses(running: Iterable[AttributedProcess]) -> tuple[ProcessUse, ...]:
    def rank(attributed: AttributedProcess) -> tuple[int, int]:
        return -(attributed.process.memory_bytes or 0), attributed.process.pid

    return tuple(
        _process_use(attributed) for attributed in sorted(running, key=rank)[:MOST_PROCESSES]
    )


def _process_use(attributed: AttributedProcess) -> ProcessUse:
    process = attributed.process
    used = process.memory_bytes
    busy = process.busy_percent
    return ProcessUse(
        pid=process.pid,
        inner_pid=attributed.origin.inner_pid,
        command=attributed.origin.command,
        memory_mib=None if used is None else min(-(-used // MIB), MOST_MIB),
        cores_percent=None if busy is None else min(busy, 100),
    )


class UsageMonitor(Collector):
    def __init__(
        self,
        node: Node,
        *,
        sample: SampleDevices,
        list_instances: ListInstances,
        proc: Path = Path("/proc"),
        processes_in_pods: bool = True,
        last_uses: LastUseFile | None = None,
        bundles: Sequence[Path] = (),
    ) -> None:
        self.node = node
        self.audit = LimitAudit(node)
        self.sample = sample
        self.list_instances = list_instances
        self.checkpoint = node.checkpoint
        self.leases = node.leases
        self.clock = node.clock
        self.proc = proc
        self.processes_in_pods = processes_in_pods
        """With simulated GPUs there are no processes."""
        self.last_uses = last_uses
        self.snapshot = UsageSnapshot()
        self.restored = 0
        self._reported_at: dict[ViolationKey, float] = {}
        self._queue: asyncio.Queue[list[ViolationFound]] = asyncio.Queue(MAX_QUEUED)
        self._errors: set[str] = set()
        self._earlier_errors: set[str] = set()
        self._pods: dict[PodUid, KubeletPod] = {}
        self._views = ContainerViews(bundles, proc)
        self._exempt = ExemptNamespaces(node.kubernetes)
        self._unlisted: dict[str, int] = {}
        self._limits = ReportLimits()
        self._symptoms = RegionSymptoms()
        self._idle = IdleShares()
        self._unrestored: set[ContainerKey] = set()
        self._identified: set[tuple[ContainerKey, int]] = set()
        """Processes, by PID in the container, whose PIDs on the node the latest scan has written:
        only of these the library counts no context later."""

    async def run(self) -> None:
        record = await self.last_uses.load() if self.last_uses else None
        if record is not None:
            self._idle.restore(record, self.clock.now())
        while True:
            await self.scan()
            await self.clock.sleep(until_tick(SCAN_S))

    async def violations(self) -> list[ViolationFound]:
        return await self._queue.get()

    def collect(self) -> Iterator[Metric]:
        return usage_metrics(
            self.snapshot,
            self.node.name,
            now=self.clock.now(),
            idle_since=self._idle.since,
            read=self.audit.read,
            restored=self.restored,
        )

    async def scan(self) -> None:
        """A process is in its region before the driver lists it: the driver is queried first."""
        began = self.clock.now()
        self._errors, self._earlier_errors = set(), self._errors
        complete = self.leases.synced and not self.checkpoint.lost
        seeing = await self._known(asyncio.to_thread(self._views.look, self.clock.ticks()), ())
        devices = await self._known(self.sample(), ())
        pids = {
            process.pid: sample.sampled_at_s for sample in devices for process in sample.processes
        }
        containers, regions = await self._read_regions(complete=complete)
        origins = await asyncio.to_thread(self._read_origins, pids) if pids else {}
        pods = await self._list_pods(origins.values())
        instances = await self._list_instances(containers)
        living = await self._living_pids(containers, regions, origins, pods or {})
        stuck, uncapped = self._symptoms.observe(regions, living, self.clock.ticks())
        scan = Scan(
            node=self.node.name,
            containers=containers,
            regions=regions,
            devices=devices,
            origins=origins,
            pods=pods or {},
            complete=complete and pods is not None,
            scanned_at=began,
            instances=instances,
            living=living,
            stuck=stuck,
            uncapped=uncapped,
            claims=await self._list_claims(containers, origins.values()),
        )
        snapshot = build_snapshot(scan)
        if seeing and scan.complete:
            visible = await self._visibility(seeing)
            snapshot = replace(snapshot, violations=(*snapshot.violations, *visible))
        found = {violation.key for violation in snapshot.violations}
        audited = (*self.audit.violations, *self.node.enforcers.findings)
        differing = (other for other in audited if other.key not in found)
        snapshot = replace(snapshot, violations=(*snapshot.violations, *differing))
        altered = {use.container.key for use in snapshot.containers if use.lacks_limits}
        await self._restore(altered, complete=complete)
        await self._identify(snapshot.containers)
        self.snapshot = replace(
            snapshot,
            scan_s=max(0.0, self.clock.now() - began),
            seen_containers=self._views.count,
        )
        self._idle.observe(snapshot.containers, began)
        if self.last_uses is not None:
            await self.last_uses.save(self._idle.record)
        self._report(snapshot.violations)

    def report(self, xids: Mapping[DeviceUuid, Mapping[int, XidEvent]]) -> UsageReply:
        hardware = (sample.hardware for sample in self.snapshot.devices)
        return UsageReply(
            measured_at=self.snapshot.scanned_at,
            shares=tuple(
                share_measurements(self.snapshot.containers, self._idle.since, self.audit.read)
            ),
            hardware=tuple(
                structs.replace(device, xids=tuple(xids.get(device.device, {}).values()))
                for device in hardware
                if device is not None
            ),
        )

    async def living_pids(self, container: ContainerKey) -> frozenset[int] | None:
        users = {leased.key: leased.pods for leased in self._leased_containers(complete=False)}
        users.setdefault(container, (container[0],))
        origins = await self._processes_of(set(users[container]))
        if origins is None:
            return None
        pods = await self._list_pods(origins.values()) or {}
        return living_pids(users, origins.values(), pods)[container]

    async def _living_pids(
        self,
        containers: Sequence[LeasedContainer],
        regions: Regions,
        origins: Mapping[int, ProcessOrigin],
        pods: Mapping[PodUid, KubeletPod],
    ) -> dict[ContainerKey, frozenset[int]] | None:
        """If a region counts memory of a process that the driver does not list, look up all."""
        if not self.processes_in_pods:
            return None
        users = {container.key: container.pods for container in containers}
        living = living_pids(users, origins.values(), pods)
        doubtful = {
            pod
            for key, region in regions.items()
            if isinstance(region, Region) and region.holders() - living[key]
            for pod in users[key]
        }
        if not doubtful:
            return living
        more_origins = await self._processes_of(doubtful)
        if more_origins is None:
            return None
        return living_pids(users, [*origins.values(), *more_origins.values()], pods)

    async def _processes_of(self, pods: Set[PodUid]) -> dict[int, ProcessOrigin] | None:
        if not self.processes_in_pods:
            return None
        return await self._known(asyncio.to_thread(processes_of, pods, self.proc), None)

    async def _known(self, reading: Awaitable[T], default: D) -> T | D:
        try:
            return await reading
        except (LeaseholdError, OSError) as error:
            if str(error) not in self._errors | self._earlier_errors:
                logger.warning("usage is incomplete: %s", error)
            self._errors.add(str(error))
            return default

    def _leased_containers(self, *, complete: bool) -> tuple[LeasedContainer, ...]:
        return leased_containers(self.checkpoint.entries, self.leases.leases, complete=complete)

    async def _list_instances(
        self, containers: Sequence[LeasedContainer]
    ) -> dict[str, MigInstance]:
        shares = (
            share for container in containers if container.instances for share in container.shares
        )
        devices = sorted({share.device for share in shares if share.mig is not None})
        listed = [await self._known(self.list_instances(device), ()) for device in devices]
        return {
            instance.uuid: instance
            for instances in listed
            for instance in instances
            if instance.uuid
        }

    async def _list_pods(self, origins: Iterable[ProcessOrigin]) -> dict[PodUid, KubeletPod] | None:
        """Return None if the list cannot be read.

        A pod and the name of a container never change: only unlisted ones have it read again.
        """
        listed = {
            (uid, container_id)
            for uid, pod in self._pods.items()
            for container_id in pod.container_ids
        }
        if not listed.issuperset(
            (origin.pod, origin.container_id) for origin in origins if origin.pod
        ):
            pods = await self._known(self.node.kubelet.list_pods(), None)
            if pods is None:
                return None
            self._pods = {pod.uid: pod for pod in pods}
        return self._pods

    async def _visibility(self, seeing: Sequence[ContainerDevices]) -> list[ViolationFound]:
        """A lease ends after its containers: one without a lease that still exists had none.

        What this agent has given to a container counts as well: while the ledger is rebuilt, its
        lease may be missing there.
        """
        leased = self._leased_containers(complete=False)
        pods = await self._list_pods(self._listable(seeing)) or {}
        view = NodeView(node=self.node.name, devices=self.node.devices, leased=leased, pods=pods)
        unleased = unleased_views(seeing, view)
        if not unleased:
            return []
        holdings = await self._known(self.node.pod_resources.list_holdings(), None)
        existing = await self._known(asyncio.to_thread(self._views.exist, seeing), ())
        namespaces = [view.pod.namespace for view in unleased]
        exempt = await self._known(self._exempt.among(namespaces, self.clock.ticks()), None)
        if holdings is None or exempt is None:
            return []
        unleased = unleased_views(existing, replace(view, claims=holdings.claims))
        return list(visibility_violations(self.node.name, unleased, exempt))

    def _listable(self, seeing: Sequence[ContainerDevices]) -> list[ProcessOrigin]:
        listed = {name for pod in self._pods.values() for name in pod.container_ids}
        self._unlisted = {
            container.container_id: self._unlisted.get(container.container_id, 0) + 1
            for container in seeing
            if container.container_id not in listed
        }
        return [
            ProcessOrigin(pod=container.pod, container_id=container.container_id)
            for container in seeing
            if self._unlisted.get(container.container_id, 0) <= MAX_UNLISTED
        ]

    async def _list_claims(
        self, containers: Iterable[LeasedContainer], origins: Iterable[ProcessOrigin]
    ) -> frozenset[ClaimHolding]:
        leased = {pod for container in containers for pod in container.pods}
        if {origin.pod for origin in origins} <= {None, *leased}:
            return frozenset()
        listed = await self._known(self.node.pod_resources.list_holdings(), None)
        return frozenset() if listed is None else listed.claims

    async def _read_regions(self, *, complete: bool) -> tuple[tuple[LeasedContainer, ...], Regions]:
        """Read those of a pod or claim that is being changed after all others."""
        containers: tuple[LeasedContainer, ...] = ()
        regions: Regions = {}
        left = self.checkpoint.pods
        while left:
            async with self.checkpoint.changing.hold_free(left) as holders:
                listed = self._leased_containers(complete=complete)
                unread = tuple(container for container in listed if container.key[0] in holders)
                if any(container.region_path for container in unread):
                    regions = {**regions, **await asyncio.to_thread(_read_all, unread)}
            containers += unread
            left -= holders
        return containers, regions

    def _read_origins(self, pids: Mapping[int, float | None]) -> dict[int, ProcessOrigin]:
        read = ((pid, read_origin(pid, self.proc, reported_at_s=at)) for pid, at in pids.items())
        return {pid: origin for pid, origin in read if origin is not None}

    async def _restore(self, altered: Set[ContainerKey], *, complete: bool) -> None:
        failed = set[ContainerKey]()
        for holder in {key[0] for key in altered}:
            async with self.checkpoint.changing.hold(holder):
                containers = self._leased_containers(complete=complete)
                again = [
                    container
                    for container in containers
                    if container.key in altered and container.key[0] == holder
                ]
                failed |= await asyncio.to_thread(self._restore_regions, again)
        self._unrestored = failed

    def _restore_regions(self, containers: Sequence[LeasedContainer]) -> set[ContainerKey]:
        """Processes with an old file open continue with it, and count as outside any region."""
        failed = set[ContainerKey]()
        for container in containers:
            if container.region_path is None or container.seed is None:
                continue
            try:
                self.restored += seed_region(container.region_path, container.seed, starting=False)
            except LeaseholdError as error:
                failed.add(container.key)
                if container.key not in self._unrestored:
                    logger.warning("altered limits could not be restored: %s", error)
        return failed

    async def _identify(self, containers: Sequence[MeasuredContainer]) -> None:
        written = set[tuple[ContainerKey, int]]()
        for use in containers:
            path = use.container.region_path
            for process in use.unidentified:
                if path is None or not isinstance(use.region, Region):
                    continue
                key = (use.container.key, process.slot.pid)
                contexts = process.contexts if key in self._identified else {}
                if not contexts and process.slot.host_pid == process.host_pid:
                    continue
                if process.slot.host_pid == 0:
                    written.add(key)
                layout = use.region.layout
                writing = asyncio.to_thread(
                    identify, path, layout, process.slot, process.host_pid, contexts
                )
                await self._known(writing, None)
        self._identified = written

    def _report(self, violations: Sequence[ViolationFound]) -> None:
        now = self.clock.ticks()
        due = now - REPORT_AGAIN_S
        new = self._limits.admit(
            (
                violation
                for violation in violations
                if self._reported_at.get(violation.key, due) <= due
            ),
            now,
        )
        self._reported_at = {
            violation.key: self._reported_at[violation.key]
            for violation in violations
            if violation.key in self._reported_at
        }
        self._reported_at |= {violation.key: now for violation in new}
        for violation in new:
            logger.warning(
                "%s/%s: %s: %s",
                violation.namespace,
                violation.name,
                violation.reason,
                violation.message,
                extra={"pod": violation.pod},
            )
        named = [
            replace(violation, found_at=self.clock.now()) for violation in new if violation.name
        ]
        if named:
            with contextlib.suppress(asyncio.QueueFull):  # no consumer; the metrics show them
                self._queue.put_nowait(named)


def _read_all(containers: Iterable[LeasedContainer]) -> Regions:
    return {
        container.key: read_region(container.region_path)
        for container in containers
        if container.region_path is not None
    }
