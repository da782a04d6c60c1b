"""The auth service's Prometheus metrics."""

from prometheus_client import Counter, Gauge

REQUESTS = Counter(
    "leasehold_auth_requests", "Authorization requests of NATS, by outcome.", ["outcome"]
)
EXPIRATION = Gauge(
    "leasehold_auth_certificate_expiration_timestamp_seconds",
    "When the certificate of NATS and Redis expires.",
)
