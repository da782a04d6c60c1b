"""Compares what holds containers with their leases, and puts back what differs."""

import asyncio
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from services.node_agent.enforcers.enforcer import Difference, Enforcer, HeldLimit
from services.node_agent.enforcers.table import check_held
from services.node_agent.metrics import LIMITS_PUT_BACK
from services.node_agent.node import Node
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from shared.model.errors import LeaseholdError
from shared.model.events.node_events import ViolationFound
from shared.model.names import DeviceUuid, PodUid

logger = logging.getLogger(__name__)

AUDIT_S = 30.0
"""Interval of comparisons: a limit that somebody changed is put back this late, at most."""
AGAIN_S = 5.0
"""Interval of comparisons while limits cannot be read, as the partitioner starts after a reboot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadShare:
    memory_bytes: int | None = None
    cores_percent: int | None = None
    difference: str = ""
    at: float = 0.0
    """Unix seconds."""
    unread: str = ""


ReadKey = tuple[PodUid, str, DeviceUuid]
EntryKey = tuple[PodUid, str, str]


class LimitAudit:
    def __init__(self, node: Node) -> None:
        self.node = node
        self.read: dict[ReadKey, ReadShare] = {}
        self.violations: tuple[ViolationFound, ...] = ()
        self._unread: dict[EntryKey, str] = {}

    async def run(self) -> None:
        due = self.node.audit_due
        while True:
            due.clear()
            await self.audit()
            await self.node.wait(due, AGAIN_S if self._unread else AUDIT_S)

    async def audit(self) -> None:
        checkpoint = self.node.checkpoint
        read: dict[ReadKey, ReadShare] = {}
        violations: list[ViolationFound] = []
        unread_before, self._unread = self._unread, {}
        for key in [entry.key for entry in checkpoint.entries]:
            async with checkpoint.changing.hold(key[0]):  # limits and records change together
                entry = checkpoint.by_key.get(key)
                if entry is None or self._has_ended(entry):
                    continue
                for enforcer in self.node.enforcers.of(entry):
                    differences = await self._compare(entry, enforcer, read)
                    violations += self._violations(entry, differences)
            await asyncio.sleep(0)
        for key, reason in self._unread.items():
            if unread_before.get(key) != reason:
                logger.warning("what holds %s of %s is not known: %s", key[1], key[0], reason)
        self.read = read
        self.violations = tuple(violations)

    def _has_ended(self, entry: CheckpointEntry) -> bool:
        leases = self.node.leases
        return leases.synced and leases.find(entry.allocation.pod) is None

    async def _compare(
        self, entry: CheckpointEntry, enforcer: Enforcer, read: dict[ReadKey, ReadShare]
    ) -> list[Difference]:
        held = await enforcer.read_back(entry)
        if held is None:
            return []
        differences = list(enforcer.audit(entry, held))
        if held.unread:
            self._unread[entry.key] = held.unread
        limits = {limit.device: limit for limit in held.limits}
        for wanted in enforcer.wanted(entry):
            device = wanted.device
            place = entry.allocation.pod, entry.allocation.container, device
            if held.unread:
                earlier = read.get(place) or self.read.get(place, ReadShare())
                read[place] = replace(earlier, unread=held.unread)
                continue
            limit = limits.get(device, HeldLimit(device=device))
            earlier = read.get(place, ReadShare())
            read[place] = ReadShare(
                memory_bytes=_first(earlier.memory_bytes, limit.memory_bytes),
                cores_percent=_first(earlier.cores_percent, limit.cores_percent),
                difference="; ".join(
                    filter(None, (earlier.difference, *_texts(differences, device)))
                ),
                at=self.node.clock.now(),
                unread=earlier.unread,
            )
        if differences:
            await self._put_back(entry, enforcer)
        return differences

    async def _put_back(self, entry: CheckpointEntry, enforcer: Enforcer) -> None:
        try:
            await enforcer.prepare(entry, starting=False, new=False)
            await check_held(entry, enforcer)
        except LeaseholdError as error:
            LIMITS_PUT_BACK.labels(enforcer.facts.name, "failed").inc()
            logger.warning("limits of %s could not be put back: %s", entry.holder, error)
        else:
            LIMITS_PUT_BACK.labels(enforcer.facts.name, "done").inc()

    def _violations(
        self, entry: CheckpointEntry, differences: list[Difference]
    ) -> Iterator[ViolationFound]:
        allocation = entry.allocation
        is_claim = entry.lease.claim is not None
        kind = "request" if is_claim else "container"
        for difference in differences:
            yield ViolationFound(
                node=self.node.name,
                reason=difference.reason,
                pod=allocation.pod,
                namespace=allocation.namespace,
                name=allocation.name,
                container=allocation.container,
                device=difference.device,
                claim=is_claim,
                message=f"{kind} {allocation.container}: {difference.text}",
            )


def _texts(differences: Iterable[Difference], device: DeviceUuid) -> Iterator[str]:
    return (other.text for other in differences if other.device in (device, None))


def _first(earlier: int | None, later: int | None) -> int | None:
    return later if earlier is None else earlier
