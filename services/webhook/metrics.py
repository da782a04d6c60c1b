"""The webhook's figures for Prometheus."""

from collections.abc import Callable

from prometheus_client import Counter, Gauge, Histogram

REVIEWS = Counter("leasehold_reviews", "Admission reviews, by outcome.", ["outcome"])
REVIEWING = Histogram(
    "leasehold_review_seconds",
    "Time to decide on one admission review.",
    buckets=(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5),
)
ENDS = Gauge(
    "leasehold_webhook_certificate_end_timestamp_seconds",
    "When the certificate that is shown ends.",
)


class PrometheusTally:
    """Counters on /metrics."""

    def count(self, outcome: str, seconds: float) -> None:
        """Note one decision and how long it took."""
        REVIEWS.labels(outcome).inc()
        REVIEWING.observe(seconds)


def watch(expires_at: Callable[[], float]) -> None:
    """Have the gauge read from this whenever somebody asks for it."""
    ENDS.set_function(expires_at)
