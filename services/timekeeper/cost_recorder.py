"""Records what every GPU was used for, from the journal of leases and the agents' measurements."""

import logging
from collections.abc import Collection, Iterable

import msgspec

from services.timekeeper.accounts.cost_hours import (
    WEEK_MS,
    LastUses,
    Size,
    charged_leases,
    device_states,
    holdings,
    record_hours,
    sizes_seen,
)
from services.timekeeper.journal_reader import WHOLE_JOURNAL
from services.timekeeper.metrics import VIOLATIONS
from shared.ledger.budgets import Budgets
from shared.ledger.leases import RedisLeases
from shared.model.budgets.budget import HOUR_MS
from shared.model.budgets.cost_records import CostHour, CostMark
from shared.model.clock import Clock
from shared.model.errors import UNDECODABLE
from shared.model.events.request_reply import ReadUsage
from shared.model.leases.ledger import NodeTotals

logger = logging.getLogger(__name__)

CLOCK_STEP_MS = 60_000
"""A clock that is set back by less is waited for."""


class CostRecorder:
    """Any number may run: the record is written if no other has written since it was read."""

    def __init__(
        self,
        *,
        store: Budgets,
        ledger: RedisLeases,
        read_usage: ReadUsage,
        clock: Clock,
        keep_days: int,
    ) -> None:
        self.store = store
        self.ledger = ledger
        self.read_usage = read_usage
        self.clock = clock
        self.kept_hours = keep_days * 24  # counted, since one wrong time must not delete them
        self._idle: LastUses = {}

    async def record(self) -> None:
        """The journal is read last: it has all changes since the leases."""
        nodes = [totals async for page in self.ledger.totals.pages() for totals in page]
        before, self._idle = self._idle, await self._read_idle(nodes)
        recorded = await self.store.costs(0, 0)
        journal = await self.store.unread_journal(WHOLE_JOURNAL, reader="cost")
        until_ms = journal.horizon_ms or 0
        sizes = sizes_seen(_decode_sizes(recorded.sizes), charged_leases(nodes), until_ms)
        hours: dict[int, CostHour] = {}
        expired: Collection[int] = ()
        passed_ms = until_ms - recorded.at_ms
        is_lost = journal.lost or journal.known_generation != journal.generation
        stored = await self.store.cost_hours()
        await self._report_clock(until_ms, passed_ms)
        if passed_ms < -CLOCK_STEP_MS:
            expired = {start for start in stored if start > until_ms - HOUR_MS}
        elif recorded.at_ms and (is_lost or passed_ms > WEEK_MS):
            why = "the journal was lost" if is_lost else "nothing was recorded for a week"
            logger.warning("%s: there are no costs of %d s", why, passed_ms // 1000)
        elif recorded.at_ms:
            hours = dict((await self.store.costs(recorded.at_ms, recorded.at_ms + 1)).hours)
            interval = (recorded.at_ms, until_ms)
            idle = (self._idle, before)
            held = holdings(charged_leases(nodes), journal.entries, idle, *interval)
            record_hours(hours, held, device_states(nodes, sizes), *interval)
            expired = sorted({*stored, *hours})[: -self.kept_hours]
        mark = CostMark(
            at_ms=until_ms,
            sizes=msgspec.json.encode([*sizes.items()]).decode(),
            hours=hours,
            expired=expired,
        )
        if passed_ms > 0 or passed_ms < -CLOCK_STEP_MS:
            await self.store.record_costs(journal, recorded, mark)

    async def _report_clock(self, until_ms: int, passed_ms: int) -> None:
        ahead_ms = until_ms - await self.store.now_ms()
        if max(ahead_ms, -passed_ms) <= CLOCK_STEP_MS:
            return
        VIOLATIONS.labels("clock-ahead").inc()
        if ahead_ms > CLOCK_STEP_MS:
            logger.error(
                "the clock of Redis was ahead, and the journal has an entry of the time in %d s: "
                "until then no GPU time is charged and no costs are recorded",
                ahead_ms // 1000,
            )
        else:
            logger.error(
                "the clock of Redis was %d s ahead: costs of that time are deleted, and are "
                "recorded from now on",
                -passed_ms // 1000,
            )

    async def _read_idle(self, nodes: Iterable[NodeTotals]) -> LastUses:
        """Agents measure the shares on their own nodes."""
        pods = {
            node_totals.node.facts.name: {lease.pod for lease in node_totals.leases}
            for node_totals in nodes
            if node_totals.leases
        }
        replies = await self.read_usage(pods)
        return {
            share.key: share.idle_since
            for name, reply in replies.items()
            for share in (reply.shares if reply else ())
            if share.pod in pods[name]
        }


def _decode_sizes(text: str) -> dict[Size, int]:
    try:
        return dict(msgspec.json.decode(text or "[]", type=list[tuple[Size, int]]))
    except UNDECODABLE:
        return {}
