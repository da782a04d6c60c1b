"""Looks at what containers use every few seconds, keeps what it saw, and puts limits back.

The page of metrics is written from the last look: a scrape asks neither the driver, nor the
kubelet, nor the API server, and a driver that hangs leaves the page readable, with its age on it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, Metric, generate_latest
from prometheus_client.registry import Collector

from services.node_agent.allocate.pod_resolution import KubeletPod
from services.node_agent.gpus.inventory import Gpu
from services.node_agent.isolation.region import Region, Tampered
from services.node_agent.isolation.region_image import altered_limits, region_path_of, seed_of
from services.node_agent.isolation.region_reader import read_region
from services.node_agent.isolation.region_seed import seed_region
from services.node_agent.mig.instances import MigInstance
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from services.node_agent.records.known_leases import KnownLeases
from services.node_agent.usage.cgroups import ProcessOrigin, read_origin
from services.node_agent.usage.snapshot import (
    DeviceSample,
    LeasedContainer,
    UsageSnapshot,
    Violation,
    build_snapshot,
)
from services.node_agent.usage.usage_metrics import usage_metrics
from shared.dialects.volcano.metrics import MONITOR_COUNTER
from shared.model.clock import Clock
from shared.model.errors import LeaseholdError, RequestError
from shared.model.lease import Lease
from shared.model.names import DeviceUuid, NodeName, PodUid

logger = logging.getLogger(__name__)

LOOK_S = 5.0
MAX_QUEUED = 256
TOLD_AGAIN_S = 300.0
"""A violation that goes on is told again after so long, for who could not act on it before."""
METRICS_PATH = "/metrics"

Regions = dict[tuple[PodUid, str], Region | Tampered | None]


class UsageSource(Protocol):
    """The driver's account of who uses its devices."""

    async def sample(self) -> tuple[DeviceSample, ...]:
        """Return all devices; UnavailableError while the driver cannot be asked."""
        ...


class Instances(Protocol):
    """The devices in MIG mode."""

    async def instances(self, device: DeviceUuid) -> tuple[MigInstance, ...]:
        """Return the instances of a device; UnavailableError while it cannot be asked."""
        ...


class Pods(Protocol):
    """The kubelet's own list."""

    async def list_pods(self) -> tuple[KubeletPod, ...]:
        """Return every pod the kubelet knows."""
        ...


class MonitoredCheckpoint(Protocol):
    """What the kubelet was told."""

    lost: bool
    changing: asyncio.Lock
    """Held while an answer and the region of its container change together."""

    @property
    def entries(self) -> tuple[CheckpointEntry, ...]:
        """Every answer that is not over."""
        ...


class UsageMonitor(Collector):
    """What the containers of one node use."""

    def __init__(
        self,
        node: NodeName,
        *,
        usage: UsageSource,
        mig: Instances,
        pods: Pods,
        checkpoint: MonitoredCheckpoint,
        leases: KnownLeases,
        clock: Clock,
        proc: Path = Path("/proc"),
    ) -> None:
        self.node = node
        self.usage = usage
        self.mig = mig
        self.pods = pods
        self.record = checkpoint
        self.leases = leases
        self.clock = clock
        self.proc = proc
        self.snapshot = UsageSnapshot()
        self.restored = 0
        self._reported_at: dict[Violation, float] = {}
        """When violations that were there at the last look were told."""
        self._queue: asyncio.Queue[list[Violation]] = asyncio.Queue(MAX_QUEUED)
        self._last_error = ""
        self._unrestored: set[tuple[PodUid, str]] = set()
        """Containers whose limits could not be put back at the last look."""

    async def run(self) -> None:
        """Look again and again until cancelled."""
        while True:
            await self.scan()
            await self.clock.sleep(LOOK_S)

    async def violations(self) -> list[Violation]:
        """Wait for violations that were not there at the look before, or are there for long."""
        return await self._queue.get()

    def collect(self) -> Iterator[Metric]:
        """Return what the last look has shown."""
        return usage_metrics(self.snapshot, self.node, now=self.clock.now(), restored=self.restored)

    async def scan(self) -> None:
        """Look once.

        The driver is asked before the regions are read: a process is in its region before the
        driver knows it.
        """
        began = self.clock.now()
        complete = self.leases.synced and not self.record.lost
        devices = await self._sample_devices()
        pids = {one.pid: sample.sampled_at_s for sample in devices for one in sample.processes}
        async with self.record.changing:
            tenants = leased_containers(self.record.entries, self.leases.leases, complete=complete)
            regions, origins = await asyncio.to_thread(self._read_host, tenants, pids)
        pods = await self._list_pods(origins.values())
        instances = await self._list_instances(tenants)
        seen = build_snapshot(
            tenants,
            regions,
            devices,
            origins,
            pods or {},
            complete=complete and pods is not None,
            scanned_at=began,
            instances=instances,
        )
        await self._restore(_altered_containers(tenants, regions), complete=complete)
        self.snapshot = replace(seen, scan_s=max(0.0, self.clock.now() - began))
        self._report(seen.violations)

    async def _sample_devices(self) -> tuple[DeviceSample, ...]:
        try:
            devices = await self.usage.sample()
        except LeaseholdError as error:
            self._log_error(str(error))
            return ()
        self._log_error("")
        return devices

    async def _list_instances(self, tenants: Sequence[LeasedContainer]) -> dict[str, MigInstance]:
        """Return the instances of the devices that containers have instances of, by UUID."""
        shares = (share for tenant in tenants if tenant.instances for share in tenant.shares)
        found: dict[str, MigInstance] = {}
        for device in sorted({share.device for share in shares if share.mig is not None}):
            try:
                found |= {one.uuid: one for one in await self.mig.instances(device) if one.uuid}
            except LeaseholdError as error:
                self._log_error(str(error))
        return found

    async def _list_pods(self, origins: Iterable[ProcessOrigin]) -> dict[PodUid, KubeletPod] | None:
        """Return the kubelet's pods if a process is in one; None if they cannot be had."""
        if not any(origin.pod for origin in origins):
            return {}
        try:
            return {pod.uid: pod for pod in await self.pods.list_pods()}
        except LeaseholdError as error:
            self._log_error(str(error))
            return None

    def _read_host(
        self, tenants: Sequence[LeasedContainer], pids: Mapping[int, float | None]
    ) -> tuple[Regions, dict[int, ProcessOrigin]]:
        regions = {
            tenant.key: read_region(tenant.place) for tenant in tenants if tenant.place is not None
        }
        found = ((pid, read_origin(pid, self.proc, reported_at_s=at)) for pid, at in pids.items())
        return regions, {pid: origin for pid, origin in found if origin is not None}

    async def _restore(self, suspects: Set[tuple[PodUid, str]], *, complete: bool) -> None:
        """Put limits back, unless they are as they should be by now: leases change meanwhile."""
        if not suspects:
            self._unrestored = set()
            return
        async with self.record.changing:
            tenants = leased_containers(self.record.entries, self.leases.leases, complete=complete)
            again = [tenant for tenant in tenants if tenant.key in suspects]
            await asyncio.to_thread(self._restore_regions, again)

    def _restore_regions(self, suspects: Sequence[LeasedContainer]) -> None:
        """Give regions their limits back; what is no region any more makes room for a fresh one.

        Processes that have the old file open go on with it, and are seen to be in no region.
        """
        regions, _ = self._read_host(suspects, {})
        unlike = _altered_containers(suspects, regions)
        kept = set[tuple[PodUid, str]]()
        for tenant in suspects:
            if tenant.key not in unlike or tenant.place is None or tenant.seed is None:
                continue
            try:
                seed_region(tenant.place, tenant.seed, starting=False)
                self.restored += 1
            except LeaseholdError as error:
                kept.add(tenant.key)
                if tenant.key not in self._unrestored:
                    logger.warning("limits stay altered: %s", error)
        self._unrestored = kept

    def _report(self, violations: Sequence[Violation]) -> None:
        now = self.clock.ticks()
        before = now - TOLD_AGAIN_S
        new = [one for one in violations if self._reported_at.get(one, before) <= before]
        self._reported_at = {one: self._reported_at.get(one, now) for one in violations}
        self._reported_at |= dict.fromkeys(new, now)
        for violation in new:
            logger.warning(
                "%s/%s: %s: %s",
                violation.namespace,
                violation.name,
                violation.reason,
                violation.message,
                extra={"pod": violation.pod},
            )
        if new:
            with contextlib.suppress(asyncio.QueueFull):  # nobody listens; the page shows them
                self._queue.put_nowait(new)

    def _log_error(self, trouble: str) -> None:
        if trouble and trouble != self._last_error:
            logger.warning("not all usage can be seen: %s", trouble)
        self._last_error = trouble


class Gpus(Protocol):
    """The GPUs of the node."""

    async def discover(self) -> tuple[Gpu, ...]:
        """Return all GPUs."""
        ...


class NoUsage:
    """The driver of simulated GPUs: nothing ever runs on them."""

    def __init__(self, gpus: Gpus) -> None:
        self.gpus = gpus

    async def sample(self) -> tuple[DeviceSample, ...]:
        """Return the devices, idle."""
        found = await self.gpus.discover()
        return tuple(
            DeviceSample(
                device=gpu.uuid,
                index=gpu.index,
                model=gpu.model,
                busy_percent=0,
                memory_busy_percent=0,
            )
            for gpu in found
        )


def _altered_containers(
    tenants: Iterable[LeasedContainer], regions: Regions
) -> frozenset[tuple[PodUid, str]]:
    """Return the containers whose limits are not those that they were given, or are gone."""
    return frozenset(
        tenant.key
        for tenant in tenants
        if tenant.place is not None
        and tenant.seed is not None
        and not (
            isinstance(region := regions.get(tenant.key), Region)
            and not altered_limits(region, tenant.seed)
        )
    )


def leased_containers(
    entries: Iterable[CheckpointEntry], leases: Mapping[PodUid, Lease], *, complete: bool
) -> tuple[LeasedContainer, ...]:
    """Return the containers that the kubelet was told to give shares.

    Those whose lease has ended are none any more; unless the leases are complete, nobody knows.
    """
    found: dict[tuple[PodUid, str], LeasedContainer] = {}
    for entry in entries:
        told = entry.allocation
        lease = leases.get(told.pod)
        if lease is None and complete:
            continue
        tenant = _leased_container(entry, lease or told.lease)
        before = found.get(tenant.key)
        if before is None or before.place is None:
            found[tenant.key] = tenant
    return tuple(found.values())


def _leased_container(entry: CheckpointEntry, lease: Lease) -> LeasedContainer:
    try:
        place = region_path_of(entry.limits)
        seed = seed_of(entry.limits.environment) if place is not None else None
    except RequestError as error:  # told by another version of the agent
        logger.debug("container %s of %s: %s", entry.allocation.container, lease.pod, error)
        place = seed = None
    return LeasedContainer(
        lease=lease,
        name=entry.allocation.container,
        place=place,
        seed=seed,
        instances=entry.instances,
    )


def render_metrics(monitor: Collector) -> bytes:
    """Write the page of metrics; its one counter keeps its published name."""
    text, name = generate_latest(monitor), MONITOR_COUNTER.name
    return text.replace(f"{name}_total ".encode(), f"{name} ".encode())


def metrics_app(monitor: Collector) -> web.Application:
    """Build the pages."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(
            body=render_metrics(monitor), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    application = web.Application()
    application.router.add_get(METRICS_PATH, metrics)
    return application
