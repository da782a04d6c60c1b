"""Limits of running containers: raised after their lease, lowered before it.

A limit that was lowered for a lease that did not change is raised again, once no binder can change
the lease any more and the ledger has confirmed it. It stays if the ledger has lost the lease.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from msgspec import structs

from services.node_agent.enforcers.mps import NO_RESIZE, holds_by_mps
from services.node_agent.isolation.region import Region
from services.node_agent.isolation.region_image import region_path_of, seed_of
from services.node_agent.isolation.region_reader import read_region
from services.node_agent.memory_limits.container_limits import LimitShortageError
from services.node_agent.node import Node
from services.node_agent.records.checkpoint_entry import CheckpointEntry, ShrunkLease
from services.node_agent.records.device_guard import OvercommitError
from services.node_agent.resize.limits import (
    ShortageError,
    check_use,
    follow_lease,
    is_grown,
    is_larger,
    lower_limits,
)
from services.node_agent.usage.monitor import UsageMonitor
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.events.request_reply import LimitsReply, LimitsRequest
from shared.model.leases.lease import Lease, ShareSize
from shared.model.names import PodUid

logger = logging.getLogger(__name__)

CHECK_S = 5.0
"""Interval of comparisons of limits with leases."""
HOLD_S = 20.0
"""How long a lowered limit stays without an update of its lease; a resize ends well before."""
LATER_S = 0.001
"""What the ledger adds at least to the time of a lease's resize with the next one."""


class LimitUpdater:
    def __init__(self, node: Node, monitor: UsageMonitor, on_change: Callable[[], None]) -> None:
        self.node = node
        self.leases = node.leases
        self.checkpoint = node.checkpoint
        self.monitor = monitor
        self.on_change = on_change
        self._wake = asyncio.Event()
        self._held_since: dict[tuple[tuple[PodUid, str, str], str], float] = {}

    async def apply_request(self, request: LimitsRequest) -> LimitsReply:
        try:
            if not request.resize_id:
                self.leases.observe([request.lease])
                return await self._follow_one(request.lease)
            if request.finished:
                await self._raise_again(request.lease.pod, request.resize_id)
            else:
                await self._lower(request.lease, request.resize_id)
        except ShortageError as error:
            return LimitsReply(
                applied=False,
                reason=str(error),
                in_use_mib=error.used_mib,
                may_follow=error.may_follow,
            )
        except LeaseholdError as error:
            return LimitsReply(applied=False, reason=str(error))
        return LimitsReply(applied=True)

    def wake(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        for entry in self.checkpoint.entries:
            if entry.lowered is not None:
                await self._write(entry)
        while True:
            await self.node.wait(self._wake, CHECK_S)
            await self._follow()
            await self._fetch_unconfirmed()

    # Leases that have another size

    async def _follow_one(self, lease: Lease) -> LimitsReply:
        refused = await self._follow(lease)
        entries = self._entries_of(lease.pod)
        if not entries:
            return LimitsReply(
                applied=False, reason=f"node {self.node.name} has allocated nothing to the pod"
            )
        late = [entry for entry in entries if entry.lowered or entry.lease.shares != lease.shares]
        for entry in late:
            if entry.key in refused:
                container = entry.allocation.container
                share = entry.lease.shares_of(container)[0]
                kept = ShareSize(memory_mib=share.memory_mib, cores_percent=share.cores_percent)
                reason = refused[entry.key]
                return LimitsReply(applied=False, reason=reason, container=container, kept=kept)
        if late:
            names = ", ".join(entry.allocation.container for entry in late)
            return LimitsReply(
                applied=False, reason=f"its containers {names} do not have its limits yet"
            )
        return LimitsReply(applied=True)

    async def _follow(self, requested: Lease | None = None) -> dict[tuple[PodUid, str, str], str]:
        """Return by entry why its device cannot hold more."""
        node = self.node.snapshot
        refused = {}
        if node is None:
            return {}
        pods = self.checkpoint.pods if requested is None else {requested.pod}
        for key in [entry.key for entry in self.checkpoint.entries if entry.key[0] in pods]:
            async with self.checkpoint.changing.hold(key[0]):
                entry = self.checkpoint.by_key.get(key)
                lease = self.leases.find(key[0])
                if entry is None or lease is None:
                    continue
                try:
                    updated = follow_lease(entry, lease, node)
                except RequestError as error:
                    logger.warning("container %s keeps its limits: %s", key[1], error)
                    continue
                is_requested = requested is not None and (
                    (requested.pod, requested.shares) == (lease.pod, lease.shares)
                )
                if updated is not None and (is_requested or not is_grown(updated, entry)):
                    reason = await self._save(updated, entry)
                    if reason:
                        refused[key] = reason
        return refused

    def _entries_of(self, pod: PodUid) -> list[CheckpointEntry]:
        return [entry for entry in self.checkpoint.entries if entry.allocation.pod == pod]

    async def _save(self, entry: CheckpointEntry, before: CheckpointEntry) -> str:
        """Return why limits are not set, or an empty text.

        Smaller ones stay recorded: they are set as soon as less is in use.
        """
        node = self.node.snapshot
        grows = node is not None and is_larger(entry, before)
        try:
            await self.checkpoint.save(entry, devices=node.devices if node and grows else None)
        except OvercommitError as error:
            logger.error(  # noqa: TRY400 - the message is enough
                "container %s keeps its limits: %s", entry.allocation.container, error
            )
            return str(error)
        reason = await self._write(entry)
        if reason and grows:
            await self.checkpoint.save(before)
            await self._write(before)
            return reason
        self.on_change()
        return ""

    async def _write(self, entry: CheckpointEntry) -> str:
        """Return why limits cannot be set, or nothing.

        Those that cannot be set at once follow when the container starts again.
        """
        try:
            await self.node.enforcers.resize(entry)
        except LeaseholdError as error:
            if self._is_exact(entry) or holds_by_mps(entry):
                logger.warning(
                    "container %s keeps its limits: %s", entry.allocation.container, error
                )
                return str(error)
            logger.warning("limits follow when the container starts again: %s", error)
        return ""

    # Leases that may become smaller

    async def _lower(self, lease: Lease, resize_id: str) -> None:
        node = self.node.require_snapshot()
        async with self.checkpoint.changing.hold(lease.pod):
            lowered = [
                smaller
                for entry in self._entries_of(lease.pod)
                if (smaller := lower_limits(entry, lease, resize_id, node))
            ]
            if not lowered:
                raise UnavailableError(
                    f"node {self.node.name} has no container of the pod that would become smaller"
                )
            for entry in lowered:
                await self._check_use(entry)
            await self._lower_exact(lowered)
            for entry in lowered:
                self._held_since.pop((entry.key, resize_id), None)
                await self._save(entry, entry)
        await self.node.clock.sleep(self.node.timing.limit_settle_s)
        try:
            for entry in lowered:
                await self._check_use(entry)
        except LeaseholdError:
            await self._raise_again(lease.pod, resize_id)
            raise

    def _is_exact(self, entry: CheckpointEntry) -> bool:
        return any(enforcer.is_exact for enforcer in self.node.enforcers.of(entry))

    async def _lower_exact(self, lowered: Sequence[CheckpointEntry]) -> None:
        """Raises ShortageError if the driver does not set limits, as more is in use."""
        limited = [entry for entry in lowered if self._is_exact(entry)]
        try:
            for entry in limited:
                await self.node.enforcers.resize(entry)
        except LeaseholdError as error:
            for entry in limited:
                await self._write(self.checkpoint.by_key[entry.key])
            if isinstance(error, LimitShortageError):
                raise ShortageError(str(error), error.used_mib, may_follow=True) from error
            raise

    async def _check_use(self, entry: CheckpointEntry) -> None:
        key = entry.allocation.pod, entry.allocation.container
        path = region_path_of(entry.limits)
        if path is None and self._is_exact(entry):
            return
        if holds_by_mps(entry):
            raise RequestError(f"container {key[1]}: {NO_RESIZE}")
        if path is None:
            raise RequestError(f"nothing holds container {key[1]} to its share")
        region = await asyncio.to_thread(read_region, path)
        if not isinstance(region, Region):
            reason = "it does not exist" if region is None else region.reason
            raise UnavailableError(
                f"the memory in use by container {key[1]} is not known: its region {path}: {reason}"
            )
        living = await self.monitor.living_pids(key)
        measured = {use.container.key: use for use in self.monitor.snapshot.containers}
        seed = seed_of(entry.limits.environment)
        check_use(entry, region, seed, measured.get(key), living)

    async def _raise_again(self, pod: PodUid, resize_id: str) -> bool:
        """Other pods may have what was free: then the limits stay."""
        refused = ""
        async with self.checkpoint.changing.hold(pod):
            for entry in self._entries_of(pod):
                if entry.lowered is not None and entry.lowered.resize_id == resize_id:
                    refused += await self._save(replace(entry, lowered=None), entry)
        return not refused

    async def _fetch_unconfirmed(self) -> None:
        now = self.node.clock.ticks()  # setting the machine's clock must not shorten it
        lowered = {
            (entry.key, entry.lowered.resize_id): entry
            for entry in self.checkpoint.entries
            if entry.lowered is not None
        }
        self._held_since = {key: self._held_since.get(key, now) for key in lowered}
        for key, entry in lowered.items():
            if now - self._held_since[key] >= HOLD_S:
                await self._end_hold(entry)

    async def _end_hold(self, entry: CheckpointEntry) -> None:
        pod = entry.allocation.pod
        try:
            leases = await self.node.lease_sync.fetch(pod)
        except UnavailableError as error:
            logger.debug("the lease of pod %s is not known: %s", pod, error)
            return
        for lease in leases:
            if (
                entry.lowered
                and lease.version <= entry.lowered.lease.version
                and not await self._raise_again(pod, entry.lowered.resize_id)
            ):
                await self._keep_lowered(pod, entry.lowered, resized_at=lease.resized_at + LATER_S)
        if entry.lowered and not leases:
            resized_at = entry.lowered.lease.resized_at + LATER_S
            await self._keep_lowered(pod, entry.lowered, resized_at=resized_at)
        await self._follow()

    async def _keep_lowered(self, pod: PodUid, lowered: ShrunkLease, *, resized_at: float) -> None:
        """The ledger has lost the lease, and restores it as recorded here."""
        lease = structs.replace(lowered.lease, resized_at=resized_at)
        async with self.checkpoint.changing.hold(pod):
            for entry in self._entries_of(pod):
                kept = replace(entry, allocation=replace(entry.allocation, lease=lease))
                if entry.lowered is not None:
                    kept = replace(kept, setup=entry.lowered.setup, lowered=None)
                await self._save(kept, entry)
