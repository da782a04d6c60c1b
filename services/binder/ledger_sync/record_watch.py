"""Watches the ledger's own records, and reports those that are missing or cannot be read.

The ledger closes itself then, and is rebuilt from pods and agents.
"""

import logging
from collections.abc import Sequence

from services.binder.metrics import PrometheusMetrics
from services.binder.report.event_writer import EventRecorder
from services.binder.report.explanations import summarize, unreadable_event
from shared.ledger.leases import RedisLeases
from shared.model.events.pod_events import ResyncRequested
from shared.model.ledger import UnreadableRecord
from shared.model.names import PodUid

logger = logging.getLogger(__name__)

MOST_UNNAMED = 1000
"""Pods of unreadable leases that are remembered until their leases are restored."""


class RecordWatch:
    """One step a second; the Event of a pod follows once its lease is restored, with its name."""

    def __init__(
        self, ledger: RedisLeases, events: EventRecorder, metrics: PrometheusMetrics
    ) -> None:
        self.ledger = ledger
        self.events = events
        self.metrics = metrics
        self._unnamed: dict[PodUid, None] = {}

    async def step(self) -> list[ResyncRequested]:
        """Check some records; return what must be requested.

        Raises UnavailableError if the server may evict keys.
        """
        found = await self.ledger.checks.step()
        if found.missing:
            self.metrics.count_anomaly("records_missing", len(found.missing))
            logger.error("the ledger has lost keys, and is rebuilt: %s", summarize(found.missing))
        if found.unreadable:
            self._report(found.unreadable)
        elif self._unnamed and not found.missing:
            await self._report_pods()
        if found.must_list:
            return [ResyncRequested(reason="the ledger does not know that pods are gone")]
        return []

    def _report(self, unreadable: Sequence[UnreadableRecord]) -> None:
        self.metrics.count_anomaly("records_unreadable", len(unreadable))
        texts = [f"{record.kind} {record.key}" for record in unreadable]
        logger.error("records are damaged, and are rebuilt: %s", summarize(texts))
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
