"""How many promised starts were kept and how early they were known."""

from collections import deque
from collections.abc import Collection
from math import floor

from prometheus_client import Gauge

from services.api.projection.visible_cluster import NamespaceFilter
from shared.ledger.preemptions import Preemptions
from shared.model.leases.preemption import EndedPromise, PromiseOutcome
from shared.model.names import Namespace
from shared.model.quantity import DAY_S
from shared.model.views.promises import PromiseSums, PromisesView

MOST_PROMISES = 20_000
PERIOD_S = 30 * DAY_S
"""Default of the report, and period of the metrics."""
ALL = Namespace("")
PROMISES = Gauge(
    "leasehold_promised_starts",
    "Promised starts that ended in the last 30 days: kept; withdrawn, with an Event that says why; "
    "or not needed any more, as their pods are gone or have started without them.",
    ["outcome"],
)
KEPT = Gauge(
    "leasehold_promised_starts_kept_ratio",
    "Part of those that were kept, of the kept and the withdrawn ones; NaN: there were none.",
)
KNOWN_BEFORE = Gauge(
    "leasehold_promised_start_known_seconds",
    "How long before their pods got GPUs half (0.5), and nine of ten (0.1), of the promises kept "
    "in the last 30 days had been made.",
    ["quantile"],
)


class PromiseJournal:
    def __init__(self) -> None:
        self._ended: deque[EndedPromise] = deque(maxlen=MOST_PROMISES)
        self._last = "0-0"

    async def read(self, store: Preemptions) -> None:
        before = ""
        while before != self._last:
            before = self._last
            self._last, ended = await store.promises(before)
            self._ended.extend(ended)

    def view(
        self, visible: NamespaceFilter, now: float, start: float | None, end: float | None
    ) -> PromisesView:
        begin = now - PERIOD_S if start is None else start
        stop = now if end is None else end
        if len(self._ended) == MOST_PROMISES:
            begin = max(begin, min(self._ended[0].at, stop))
        by_name: dict[Namespace, list[EndedPromise]] = {}
        for promise in self._ended:
            if begin <= promise.at <= stop and visible(promise.namespace):
                by_name.setdefault(promise.namespace, []).append(promise)
        return PromisesView(
            start=begin,
            end=stop,
            namespaces=tuple(_sums(by_name[name], name) for name in sorted(by_name)),
            total=_sums([promise for ended in by_name.values() for promise in ended]),
        )


def export_promises(total: PromiseSums) -> None:
    """How early promises were known has no series while none was kept."""
    for outcome in PromiseOutcome:
        PROMISES.labels(outcome).set(getattr(total, outcome))
    KEPT.set(float("nan") if total.kept_percent is None else total.kept_percent / 100)
    KNOWN_BEFORE.clear()
    for quantile, seconds in (("0.5", total.half_known_s), ("0.1", total.most_known_s)):
        if seconds is not None:
            KNOWN_BEFORE.labels(quantile).set(seconds)


def _sums(ended: Collection[EndedPromise], namespace: Namespace = ALL) -> PromiseSums:
    def count(outcome: PromiseOutcome) -> int:
        return sum(promise.outcome is outcome for promise in ended)

    kept = count(PromiseOutcome.KEPT)
    withdrawn = count(PromiseOutcome.WITHDRAWN)
    known_s = sorted(
        max(promise.at - promise.opened_at, 0.0)
        for promise in ended
        if promise.outcome is PromiseOutcome.KEPT
    )
    return PromiseSums(
        namespace=namespace,
        kept=kept,
        withdrawn=withdrawn,
        not_needed=count(PromiseOutcome.NOT_NEEDED),
        kept_percent=floor(1000 * kept / (kept + withdrawn)) / 10 if kept + withdrawn else None,
        half_known_s=known_s[(len(known_s) - 1) // 2] if known_s else None,
        most_known_s=known_s[(len(known_s) - 1) // 10] if known_s else None,
    )
