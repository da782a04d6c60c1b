"""Has a ledger rebuilt that is damaged: records cannot be decoded, or totals are not their sums."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from services.binder.metrics import count_anomaly
from services.binder.report.event_writer import EventRecorder
from services.binder.report.explanations import summarize, unreadable_event
from shared.ledger.leases import RedisLeases
from shared.ledger.total_checks import CHECKS, NODE_CHECKS, LedgerReading
from shared.model.clock import Clock
from shared.model.errors import UnavailableError
from shared.model.leases.ledger import UnreadableRecord
from shared.model.names import PodUid
from shared.runtime.service import loops

logger = logging.getLogger(__name__)

POLICY_S = 1.0
"""Interval of checks of the ledger's settings, and of its records while some are damaged."""
READ_S = 5.0
"""Interval between two readings of the ledger."""
PAUSE_FACTOR = 20
"""Reading takes at most a twentieth of the binder's time: a large ledger is read less often."""
NOT_AGAIN_S = 600.0
"""A rebuild for the same record or total has not helped; the audit and the alert remain."""
MOST_REBUILDS = 10
"""Within `NOT_AGAIN_S`, whatever is damaged: placing stops during each."""
MOST_UNNAMED = 1000
"""Pods of unreadable leases that are remembered until their leases are restored."""


@dataclass(eq=False, kw_only=True)
class RecordWatch:
    """Reads the ledger while this binder leads.

    What is damaged in two readings in a row closes the ledger, and is restored by its rebuild. The
    Event of a pod follows once its lease is restored, with its name.
    """

    ledger: RedisLeases
    events: EventRecorder
    leads: Callable[[], Awaitable[bool]]
    clock: Clock

    def __post_init__(self) -> None:
        self._read_at = 0.0
        self._damaged = frozenset[str]()
        self._closed_for: dict[str, float] = {}
        self._unnamed: dict[PodUid, None] = {}

    @loops(every_s=POLICY_S)
    async def check_records(self) -> None:
        """Check the server's policy, and, at intervals, the records and totals.

        Raises UnavailableError if the server may evict keys.
        """
        await self.ledger.checks.check_policy()
        began_s = self.clock.ticks()
        if began_s < self._read_at:
            return
        try:
            if await self.leads():
                await self._check(await self.ledger.checks.read())
        except UnavailableError:  # its rebuild reports itself
            self._damaged = frozenset()
        now_s = self.clock.ticks()
        pause_s = POLICY_S if self._damaged else READ_S
        self._read_at = now_s + max(pause_s, PAUSE_FACTOR * (now_s - began_s))

    async def _check(self, reading: LedgerReading) -> None:
        damages = damages_in(reading)
        lasting = self._damaged.intersection(damages)
        self._damaged = frozenset(damages)
        if not damages and self._unnamed:
            await self._report_pods()
        if not self._may_close(lasting):
            return
        if not await self.ledger.checks.close(reading.generation, reading.unreadable):
            return
        self._closed_for |= dict.fromkeys(lasting, self.clock.ticks())
        logger.error(
            "the ledger is damaged, and is rebuilt: %s", summarize(sorted(damages.values()))
        )
        count_anomaly("records_unreadable", len(reading.unreadable))
        count_anomaly("totals_wrong", len(damages) - len(reading.unreadable))
        self._report(reading.unreadable)

    def _may_close(self, lasting: frozenset[str]) -> bool:
        since = self.clock.ticks() - NOT_AGAIN_S
        self._closed_for = {damage: at for damage, at in self._closed_for.items() if at > since}
        rebuilds = len(set(self._closed_for.values()))
        return rebuilds < MOST_REBUILDS and not lasting <= self._closed_for.keys()

    def _report(self, unreadable: Sequence[UnreadableRecord]) -> None:
        for record in unreadable:
            if record.node:
                self.events.record(unreadable_event(record))
            elif len(self._unnamed) < MOST_UNNAMED:
                self._unnamed[PodUid(record.key)] = None

    async def _report_pods(self) -> None:
        for lease in await self.ledger.load(list(self._unnamed)):
            if lease is not None:
                record = UnreadableRecord("leases", lease.pod, lease.node)
                self.events.record(unreadable_event(record, lease))
        self._unnamed.clear()


def damages_in(reading: LedgerReading) -> dict[str, str]:
    """Return texts by what is damaged: the kind and key of a record, or the subject of a total."""
    damages = {
        f"{record.kind} {record.key}": f"{record.kind} {record.key} cannot be decoded"
        for record in reading.unreadable
    }
    checks = CHECKS if reading.is_of_one_moment else NODE_CHECKS
    for difference in (difference for check in checks for difference in check(reading)):
        damages.setdefault(difference.subject, f"{difference.subject}: {difference.text}")
    return damages
