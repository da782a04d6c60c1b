"""Running containers follow their leases: larger when the ledger says so, smaller before it does.

What a container is held to is in the checkpoint before it is in its region, so that a restart of
either keeps to it. A limit that was lowered for a lease that then did not change is raised again,
but not before the ledger itself says so, later than any binder could still have changed it.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Protocol

from services.node_agent.allocate.allocation import NodeSnapshot
from services.node_agent.allocate.pod_resolver import LeaseRequester
from services.node_agent.isolation.limits import (
    excess_requests,
    follow_lease,
    lower_limits,
    shortage,
    shortage_text,
)
from services.node_agent.isolation.region import Region, RegionPath
from services.node_agent.isolation.region_control import RegionChanges, write_changes
from services.node_agent.isolation.region_image import region_path_of, seed_of
from services.node_agent.isolation.region_reader import read_region
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from services.node_agent.records.known_leases import KnownLeases
from services.node_agent.timeouts import set_within
from services.node_agent.usage.measurements import MeasuredContainer
from services.node_agent.usage.snapshot import UsageSnapshot
from shared.model.clock import Clock
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.events.request_reply import LeasesReply, LeasesRequest, LimitsReply, LimitsRequest
from shared.model.lease import Lease
from shared.model.names import NodeName, PodUid

logger = logging.getLogger(__name__)

LOOK_S = 1.0
HOLD_S = 20.0
"""So long a lowered limit stays without news of its lease; a turn is over well before."""
SETTLE_S = 0.1
"""An allocation that was let through before a limit was lowered is counted within this."""
ASK_S = 2.0


class Record(Protocol):
    """What the kubelet was told."""

    changing: asyncio.Lock
    """Held while an answer and its region change together."""

    @property
    def entries(self) -> tuple[CheckpointEntry, ...]:
        """All answers that are not over."""
        ...

    async def save(self, entry: CheckpointEntry) -> None:
        """Record an answer; it is safe when this returns."""
        ...


class Seeing(Protocol):
    """The monitor."""

    snapshot: UsageSnapshot


class _ShortageError(RequestError):
    """A container uses more than it is to be limited to."""

    def __init__(self, reason: str, used_mib: int) -> None:
        super().__init__(reason)
        self.used_mib = used_mib


class LimitUpdater:
    """The limits of one node's running containers."""

    def __init__(
        self,
        node: NodeName,
        *,
        leases: KnownLeases,
        record: Record,
        facts: Callable[[], NodeSnapshot | None],
        monitor: Seeing,
        asking: LeaseRequester,
        clock: Clock,
    ) -> None:
        self.node = node
        self.leases = leases
        self.record = record
        self.facts = facts
        self.monitor = monitor
        self.asking = asking
        self.clock = clock
        self.changed: Callable[[], None] = lambda: None
        """Called when what pods ask for beyond their leases may have changed."""
        self._wake = asyncio.Event()
        self._held_since: dict[tuple[tuple[PodUid, str, str], str], float] = {}

    async def apply_request(self, asked: LimitsRequest) -> LimitsReply:
        """Set the limits of a lease, or hold containers to what it may become."""
        try:
            if not asked.resize_id:
                self.leases.observe([asked.lease])
                return await self._follow_one(asked.lease)
            if asked.finished:
                await self._raise_again(asked.lease.pod, asked.resize_id)
            else:
                await self._lower(asked.lease, asked.resize_id)
        except _ShortageError as error:
            return LimitsReply(applied=False, reason=str(error), in_use_mib=error.used_mib)
        except LeaseholdError as error:
            return LimitsReply(applied=False, reason=str(error))
        return LimitsReply(applied=True)

    def wake(self) -> None:
        """Look at the leases without delay: one of them may have another size."""
        self._wake.set()

    @property
    def beyond(self) -> Mapping[str, int]:
        """What pods ask of resources in node status beyond what they have by now."""
        return excess_requests(self.record.entries)

    async def run(self) -> None:
        """Keep containers to their leases until cancelled."""
        for entry in self.record.entries:
            if entry.lowered is not None:
                await self._write(entry)
        while True:
            await set_within(self._wake, LOOK_S)
            self._wake.clear()
            await self._follow()
            await self._end_old_holds()

    # Leases that have another size

    async def _follow_one(self, lease: Lease) -> LimitsReply:
        await self._follow()
        entries = [one for one in self.record.entries if one.allocation.pod == lease.pod]
        late = [one for one in entries if one.lowered or one.lease.shares != lease.shares]
        if not entries:
            return LimitsReply(
                applied=False, reason=f"node {self.node} has told its kubelet nothing"
            )
        if late:
            names = ", ".join(one.allocation.container for one in late)
            return LimitsReply(applied=False, reason=f"its containers {names} do not follow it yet")
        return LimitsReply(applied=True)

    async def _follow(self) -> None:
        """Have answers and regions say what the leases do by now."""
        node = self.facts()
        if node is None:
            return
        for key in [entry.key for entry in self.record.entries]:
            async with self.record.changing:
                entry = self._entry(key)
                lease = self.leases.find(key[0])
                if entry is None or lease is None:
                    continue
                try:
                    new = follow_lease(entry, lease, node)
                except RequestError as error:
                    logger.warning("container %s keeps its limits: %s", key[1], error)
                    continue
                if new is not None:
                    await self.record.save(new)
                    await self._write(new)
                    self.changed()

    def _entry(self, key: tuple[PodUid, str, str]) -> CheckpointEntry | None:
        return next((entry for entry in self.record.entries if entry.key == key), None)

    async def _write(self, entry: CheckpointEntry) -> None:
        """Give a region its limits; one that is not there gets them when it is made."""
        place = _place(entry)
        if place is None:
            return
        seed = seed_of(entry.limits.environment)
        changes = RegionChanges(memory_limits=seed.memory_limits, core_limits=seed.core_limits)
        try:
            await asyncio.to_thread(write_changes, place, changes, forced=True)
        except UnavailableError as error:
            logger.warning("limits follow when the container starts again: %s", error)

    # Leases that may become smaller

    async def _lower(self, lease: Lease, turn: str) -> None:
        """Hold containers to a smaller lease. Raises RequestError naming what is in the way."""
        node = self.facts()
        if node is None:
            raise UnavailableError("the node agent does not know its devices yet")
        async with self.record.changing:
            changed = [
                new
                for entry in self._of(lease.pod)
                if (new := lower_limits(entry, lease, turn, node))
            ]
            if not changed:
                raise UnavailableError(
                    f"node {self.node} has told its kubelet of no container that would be smaller"
                )
            for entry in changed:
                await self._check(entry)
            for entry in changed:
                await self.record.save(entry)
                self._held_since.pop((entry.key, turn), None)
                await self._write(entry)
        self.changed()
        await self.clock.sleep(SETTLE_S)
        try:
            for entry in changed:
                await self._check(entry)
        except LeaseholdError:
            await self._raise_again(lease.pod, turn)
            raise

    async def _check(self, entry: CheckpointEntry) -> None:
        """Raise RequestError if the container uses more than it is to be limited to."""
        place = _place(entry)
        if place is None:
            raise RequestError(
                f"HAMi-core does not hold container {entry.allocation.container} to its share"
            )
        region = await asyncio.to_thread(read_region, place)
        if not isinstance(region, Region):
            lack = "it is not there" if region is None else region.reason
            raise UnavailableError(
                f"what container {entry.allocation.container} has in use is not known: its region "
                f"{PurePosixPath(place.directory) / place.name}: {lack}"
            )
        found = shortage(entry, region, seed_of(entry.limits.environment), self._use_of(entry))
        if found is not None:
            raise _ShortageError(shortage_text(entry, found), found.used_mib)

    def _use_of(self, entry: CheckpointEntry) -> MeasuredContainer | None:
        who = entry.allocation.pod, entry.allocation.container
        return next(
            (use for use in self.monitor.snapshot.containers if use.container.key == who), None
        )

    def _of(self, pod: PodUid) -> Iterable[CheckpointEntry]:
        return [entry for entry in self.record.entries if entry.allocation.pod == pod]

    async def _raise_again(self, pod: PodUid, turn: str) -> None:
        """End what was held in a turn: the lease stayed as it was."""
        async with self.record.changing:
            for entry in self._of(pod):
                if entry.lowered is not None and entry.lowered.resize_id == turn:
                    await self._release(entry)

    async def _release(self, entry: CheckpointEntry) -> None:
        before = replace(entry, lowered=None)
        await self.record.save(before)
        await self._write(before)
        self.changed()

    async def _end_old_holds(self) -> None:
        """Ask what became of leases that were to be smaller, and that nobody has told of since."""
        now = asyncio.get_running_loop().time()  # a clock that is set must not shorten it
        held = {
            (entry.key, entry.lowered.resize_id): entry
            for entry in self.record.entries
            if entry.lowered is not None
        }
        self._held_since = {key: self._held_since.get(key, now) for key in held}
        for key, entry in held.items():
            if now - self._held_since[key] >= HOLD_S:
                await self._settle(entry)

    async def _settle(self, entry: CheckpointEntry) -> None:
        pod = entry.allocation.pod
        try:
            told = await self.asking.request(
                LeasesRequest(node=self.node, pods=(pod,)), LeasesReply, timeout_s=ASK_S
            )
        except UnavailableError as error:
            logger.debug("the lease of pod %s is not told: %s", pod, error)
            return
        self.leases.observe(told.leases)
        for lease in told.leases:
            if entry.lowered and lease.version <= entry.lowered.lease.version:
                await self._raise_again(pod, entry.lowered.resize_id)
        await self._follow()


def _place(entry: CheckpointEntry) -> RegionPath | None:
    return region_path_of(entry.limits)
