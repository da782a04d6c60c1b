"""The placer's Prometheus metrics."""

import functools

from prometheus_client import Counter, Gauge

from shared.placing.mirror.cluster_mirror import ClusterMirror

DECISIONS = Counter(
    "leasehold_placements",
    "Decisions by outcome: reserved, reserved_other (not the first choice), already_leased (a "
    "repeat), no_capacity (used meanwhile), deferred (offered to a pod that comes first), "
    "gang_incomplete (another pod of its gang does not fit), too_large (its lease cannot be "
    "stored), gone (the pod no longer exists), "
    "refused, stale (refused, but capacity was freed), feed_truncated.",
    ["outcome"],
)
NODES = Gauge("leasehold_placer_nodes", "Nodes that the placer knows.")


_counter = functools.cache(DECISIONS.labels)


def count(outcome: str, amount: int = 1) -> None:
    if amount:
        _counter(outcome).inc(amount)


def export_mirror(mirror: ClusterMirror) -> None:
    NODES.set_function(lambda: len(mirror.nodes))
