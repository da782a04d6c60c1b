"""The binder's counters for Prometheus."""

from prometheus_client import Counter

COUNTED = Counter(
    "leasehold_binder_remarks",
    "What the binder had to drop, or found to differ between ledger and cluster.",
    ["what"],
)


class PrometheusTally:
    """Counters by name, on /metrics."""

    def count(self, what: str, by: int = 1) -> None:
        """Add to the counter called `what`."""
        COUNTED.labels(what).inc(by)
