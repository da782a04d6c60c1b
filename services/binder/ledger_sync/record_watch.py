"""Has damaged records and totals written anew, with the ledger.

A record that cannot be decoded is written anew alone. A wrong total does not show which record is
wrong: the ledger is rebuilt.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from services.binder.metrics import count_anomaly
from services.binder.report.event_writer import EventRecorder
from services.binder.report.explanations import summarize, unreadable_event
from shared.ledger.leases import RedisLeases
from shared.ledger.total_checks import CHECKS, NODE_CHECKS, LedgerReading
from shared.model.clock import Clock
from shared.model.errors import ConflictError, UnavailableError
from shared.model.events.pod_events import ResyncRequested
from shared.model.leases.ledger import UnreadableRecord
from shared.model.names import PodUid
from shared.runtime.service import loops

logger = logging.getLogger(__name__)

POLICY_S = 1.0
"""Interval of checks of the ledger's settings, and of its records while some are damaged."""
READ_S = 5.0
"""Interval between two readings of the ledger."""
PAUSE_FACTOR = 20
"""Reading takes at most a twentieth of the binder's time."""
NOT_AGAIN_S = 600.0
"""Writing the same record or total anew has not helped; the audit and the alert remain."""
MOST_REPAIRS = 10
"""Within `NOT_AGAIN_S`: others wait during each."""
MOST_RENEWED = 64
"""If more are damaged, the ledger is rebuilt."""
MOST_UNNAMED = 1000
"""Pods of unreadable leases, until these are restored."""


@dataclass(eq=False)
class RecordWatch:
    """Reads the ledger while this binder leads.

    What is damaged in two readings in a row is written anew. A pod's Event follows once its lease,
    with its name, is restored.
    """

    ledger: RedisLeases
    renew: Callable[[str, Sequence[UnreadableRecord]], Awaitable[list[ResyncRequested]]]
    events: EventRecorder
    leads: Callable[[], Awaitable[bool]]
    clock: Clock

    def __post_init__(self) -> None:
        self._read_at = 0.0
        self._damaged = frozenset[str]()
        self._repaired: dict[str, float] = {}
        self._unnamed: dict[PodUid, None] = {}

    @loops(every_s=POLICY_S)
    async def check_records(self) -> list[ResyncRequested]:
        """Check the server's policy, and, at intervals, the records and totals.

        Raises UnavailableError if the server may evict keys.
        """
        await self.ledger.checks.check_policy()
        began_s = self.clock.ticks()
        if began_s < self._read_at:
            return []
        events: list[ResyncRequested] = []
        took_s = 0.0
        try:
            if await self.leads():
                reading = await self.ledger.checks.read()
                # Adding up 10,000 leases takes a second: Bindings go on meanwhile.
                damages = await asyncio.to_thread(damages_in, reading)
                took_s = self.clock.ticks() - began_s
                events = await self._check(reading, damages)
        except (UnavailableError, ConflictError):  # its rebuild reports itself
            self._damaged = frozenset()
        pause_s = POLICY_S if self._damaged else READ_S
        self._read_at = self.clock.ticks() + max(pause_s, PAUSE_FACTOR * took_s)
        return events

    async def _check(
        self, reading: LedgerReading, damages: Mapping[str, str]
    ) -> list[ResyncRequested]:
        lasting = self._damaged.intersection(damages)
        self._damaged = frozenset(damages)
        if not damages and self._unnamed:
            await self._report_pods()
        if not self._may_repair(lasting):
            return []
        due = lasting - self._repaired.keys()
        records = [record for record in reading.unreadable if _name(record) in due]
        logger.error(
            "the ledger is damaged, and is written anew: %s", summarize(sorted(damages.values()))
        )
        events: list[ResyncRequested] = []
        if 0 < len(records) <= MOST_RENEWED:
            self._repaired |= dict.fromkeys(map(_name, records), self.clock.ticks())
            events = await self.renew(reading.generation, records)
        elif await self.ledger.checks.close(reading.generation, reading.unreadable):
            self._repaired |= dict.fromkeys(lasting, self.clock.ticks())
            count_anomaly("totals_wrong", len(damages) - len(reading.unreadable))
        count_anomaly("records_unreadable", len(records))
        self._report(records)
        return events

    def _may_repair(self, lasting: frozenset[str]) -> bool:
        since = self.clock.ticks() - NOT_AGAIN_S
        self._repaired = {damage: at for damage, at in self._repaired.items() if at > since}
        repairs = len(set(self._repaired.values()))
        return repairs < MOST_REPAIRS and not lasting <= self._repaired.keys()

    def _report(self, unreadable: Sequence[UnreadableRecord]) -> None:
        for record in unreadable:
            if record.kind in {"devices", "nodes"}:
                self.events.record(unreadable_event(record))
            elif record.kind == "leases" and len(self._unnamed) < MOST_UNNAMED:
                self._unnamed[PodUid(record.key)] = None

    async def _report_pods(self) -> None:
        for lease in await self.ledger.load(list(self._unnamed)):
            if lease is not None:
                record = UnreadableRecord("leases", lease.pod, lease.node)
                self.events.record(unreadable_event(record, lease))
        self._unnamed.clear()


def damages_in(reading: LedgerReading) -> dict[str, str]:
    """Return texts by record or total; with unreadable records, totals say nothing."""
    if reading.unreadable:
        return {
            _name(record): f"{_name(record)} cannot be decoded" for record in reading.unreadable
        }
    damages: dict[str, str] = {}
    checks = CHECKS if reading.is_of_one_moment else NODE_CHECKS
    for difference in (difference for check in checks for difference in check(reading)):
        damages.setdefault(difference.subject, f"{difference.subject}: {difference.text}")
    return damages


def _name(record: UnreadableRecord) -> str:
    return f"{record.kind} {record.key}"
