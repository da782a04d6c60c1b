"""Request counts and latencies, as Prometheus reads them."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)


class ApiServerMetrics:
    """The API server's metrics, under the names a Kubernetes API server gives them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "apiserver_request_total",
            "Requests by verb, resource and code.",
            ("verb", "resource", "subresource", "code"),
            registry=self.registry,
        )
        self._seconds = Histogram(
            "apiserver_request_duration_seconds",
            "Time to answer, without watches.",
            ("verb", "resource"),
            registry=self.registry,
            buckets=_BUCKETS_S,
        )
        self.watches = Gauge(
            "apiserver_longrunning_requests",
            "Watches that are open.",
            ("resource",),
            registry=self.registry,
        )

    def count(
        self, verb: str, resource: str, subresource: str, *, code: int, took_s: float
    ) -> None:
        """Count one request; the time of a watch is not a latency and is left out."""
        self._requests.labels(verb, resource, subresource, str(code)).inc()
        if verb != "WATCH":
            self._seconds.labels(verb, resource).observe(took_s)

    def text(self) -> bytes:
        """Return everything in the text format."""
        return generate_latest(self.registry)
