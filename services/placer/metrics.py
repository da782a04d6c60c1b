"""The placer's figures for Prometheus."""

from prometheus_client import Counter, Gauge

from services.placer.mirror.cluster_mirror import Mirror

DECISIONS = Counter(
    "leasehold_placements",
    "Decisions by outcome: reserved, reserved_other (not the first choice), held (a repeat), "
    "full (taken meanwhile), kept (for a higher priority), withheld (another pod of its gang does "
    "not fit), refused, stale (refused, but capacity was freed), feed_lost.",
    ["outcome"],
)
NODES = Gauge("leasehold_placer_nodes", "Nodes in the placer's mirror.")


class PrometheusTally:
    """Counts on the process's metrics page."""

    def count(self, outcome: str, amount: int = 1) -> None:
        """Add to the number of an outcome."""
        if amount:
            DECISIONS.labels(outcome).inc(amount)


def watch_mirror(mirror: Mirror) -> None:
    """Show the mirror's size from now on."""
    NODES.set_function(lambda: len(mirror.nodes))
