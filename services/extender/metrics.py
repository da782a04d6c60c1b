"""The extender's Prometheus metrics."""

from prometheus_client import Counter, Histogram

REQUESTS = Counter(
    "leasehold_extender_requests",
    "Requests of kube-scheduler by verb (filter, prioritize, bind) and outcome: ok, refused (no "
    "node fits, or the pod was not bound), error (no verdict).",
    ["verb", "outcome"],
)
SECONDS = Histogram(
    "leasehold_extender_request_seconds",
    "Time to reply to a request of kube-scheduler.",
    ["verb"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
)


class ExtenderMetrics:
    """Counts requests on the metrics page."""

    def count(self, verb: str, outcome: str, seconds: float) -> None:
        """Count one request."""
        REQUESTS.labels(verb, outcome).inc()
        SECONDS.labels(verb).observe(seconds)
