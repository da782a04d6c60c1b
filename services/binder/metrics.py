"""The binder's Prometheus metrics."""

from prometheus_client import Counter

ANOMALIES = Counter(
    "leasehold_binder_anomalies",
    "Dropped messages, and mismatches between ledger and cluster, by kind.",
    ["kind"],
)
for _kind in (
    "active_without_lease",
    "deleted_nodes",
    "devices_on_two_nodes",
    "leases_elsewhere",
    "ledger_rebuilt",
    "lost_leases",
    "not_restored",
    "pods_without_lease",
    "totals_wrong",
    "records_unreadable",
    "refused_of_nodes",
):
    ANOMALIES.labels(_kind)  # starts at 0, so that the first one is an increase

EVICTIONS = Counter(
    "leasehold_preemption_evictions",
    "Pods evicted, by their namespace and the cause.",
    ["namespace", "cause"],
)

RESIZES = Counter(
    "leasehold_resizes",
    "Requests to resize the lease of a running pod, by outcome.",
    ["outcome"],
)


MOST_NAMESPACES = 1_000
OTHER_NAMESPACES = "other namespaces"
_namespaces = set[str]()


def count_eviction(namespace: str, cause: str) -> None:
    """The series of a namespace stays, so only so many get their own."""
    if len(_namespaces) < MOST_NAMESPACES:
        _namespaces.add(namespace)
    EVICTIONS.labels(namespace if namespace in _namespaces else OTHER_NAMESPACES, cause).inc()


def count_anomaly(kind: str, count: int = 1) -> None:
    ANOMALIES.labels(kind).inc(count)
