"""The auth service's figures for Prometheus."""

from collections.abc import Callable

from prometheus_client import Counter, Gauge

ANSWERS = Counter("leasehold_auth_requests", "Who came to NATS, by outcome.", ["outcome"])
ENDS = Gauge(
    "leasehold_auth_certificate_expiration_timestamp_seconds",
    "When the certificate of NATS and Redis ends.",
)


class PrometheusTally:
    """Counters on /metrics."""

    def count(self, outcome: str) -> None:
        """Note somebody who was let in, or refused."""
        ANSWERS.labels(outcome).inc()


def watch(ends_at: Callable[[], float]) -> None:
    """Have the gauge read from this whenever somebody asks for it."""
    ENDS.set_function(ends_at)
