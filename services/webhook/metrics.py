"""The webhook's Prometheus metrics."""

from collections.abc import Callable

from prometheus_client import Counter, Gauge, Histogram

REVIEWS = Counter("leasehold_admission_reviews", "Admission reviews, by outcome.", ["outcome"])
REVIEW_DURATION = Histogram(
    "leasehold_admission_review_duration_seconds",
    "Time to decide on one admission review.",
    buckets=(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5),
)
CERTIFICATE_EXPIRATION = Gauge(
    "leasehold_webhook_certificate_expiration_timestamp_seconds",
    "When the certificate that the webhook serves expires.",
)


class WebhookMetrics:
    """Metrics of decisions and of the certificate."""

    def count_review(self, outcome: str, duration_s: float) -> None:
        """Count one decision."""
        REVIEWS.labels(outcome).inc()
        REVIEW_DURATION.observe(duration_s)

    def export_expiration(self, expires_at: Callable[[], float]) -> None:
        """Read the gauge from `expires_at` (Unix seconds) at every scrape."""
        CERTIFICATE_EXPIRATION.set_function(expires_at)
