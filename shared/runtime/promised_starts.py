"""How promised starts have ended, for /metrics of the binder and the planner."""

from enum import StrEnum

from prometheus_client import Counter, Histogram

from shared.model.leases.preemption import StoredStart

PROMISES = Counter(
    "leasehold_promised_starts",
    "Promised starts that have ended: kept; withdrawn, with an Event that says why; or not needed "
    "any more, as their pods are gone or have started without them.",
    ["outcome"],
)
KNOWN_BEFORE = Histogram(
    "leasehold_promised_start_known_seconds",
    "How long before its pods got their GPUs a promise that was kept had been made.",
    buckets=(10, 60, 300, 900, 3600, 14_400, 43_200, 86_400, 604_800),
)


class PromiseOutcome(StrEnum):
    KEPT = "kept"
    WITHDRAWN = "withdrawn"
    NOT_NEEDED = "not_needed"


for _outcome in PromiseOutcome:
    PROMISES.labels(_outcome)  # starts at 0, so that the first one is an increase


def count_end(start: StoredStart, outcome: PromiseOutcome, now: float) -> None:
    """Count the end of a start by the caller that has removed it, if it was a promise."""
    if not start.enforced:
        return
    PROMISES.labels(outcome).inc()
    if outcome is PromiseOutcome.KEPT:
        KNOWN_BEFORE.observe(max(now - start.opened_at, 0.0))
