"""The auth service's Prometheus metrics."""

from collections.abc import Callable

from prometheus_client import Counter, Gauge

REQUESTS = Counter(
    "leasehold_auth_requests", "Authorization requests of NATS, by outcome.", ["outcome"]
)
EXPIRATION = Gauge(
    "leasehold_auth_certificate_expiration_timestamp_seconds",
    "When the certificate of NATS and Redis expires.",
)


class PrometheusAuthMetrics:
    """Counters on /metrics."""

    def count(self, outcome: str) -> None:
        """Count one authorization request as `authorized` or `refused`."""
        REQUESTS.labels(outcome).inc()


def export_expiration(expires_at: Callable[[], float]) -> None:
    """Read the gauge from this function at each scrape."""
    EXPIRATION.set_function(expires_at)
