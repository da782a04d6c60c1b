"""The webhook's Prometheus metrics."""

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
