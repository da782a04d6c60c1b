"""The binder's counters for Prometheus."""

from prometheus_client import Counter

from shared.model.preemption import Victim

COUNTED = Counter(
    "leasehold_binder_anomalies",
    "What the binder had to drop, or found to differ between ledger and cluster.",
    ["kind"],
)
for _kind in ("active_without_lease", "leases_elsewhere", "not_restored", "pods_without_lease"):
    COUNTED.labels(_kind)  # at 0 from the start, or the first one would be no increase

EVICTED = Counter(
    "leasehold_preemption_evictions",
    "Pods evicted, by their namespace, why, and the namespace of the pod that gets their devices.",
    ["namespace", "cause", "beneficiary"],
)


RESIZES = Counter(
    "leasehold_resizes",
    "Wishes of operators that a running pod's lease get another size, by what came of them.",
    ["outcome"],
)


def count_resize(outcome: str) -> None:
    """Count one wish: resized, unchanged, refused or unavailable."""
    RESIZES.labels(outcome).inc()


class PrometheusEvictions:
    """Evictions, on /metrics."""

    def evicted(self, victim: Victim, beneficiary: str) -> None:
        """Count one, for a namespace; empty: for nobody in particular."""
        EVICTED.labels(victim.namespace, victim.cause, beneficiary).inc()


class PrometheusTally:
    """Counters by name, on /metrics."""

    def count(self, kind: str, by: int = 1) -> None:
        """Add to the counter called `kind`."""
        COUNTED.labels(kind).inc(by)
