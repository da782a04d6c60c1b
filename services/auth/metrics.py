"""The doorkeeper's figures for Prometheus."""

from collections.abc import Callable

from prometheus_client import Counter, Gauge

ANSWERS = Counter("leasehold_doors_answers", "Who came to NATS, by outcome.", ["outcome"])
ENDS = Gauge(
    "leasehold_doors_certificate_end_timestamp_seconds",
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
