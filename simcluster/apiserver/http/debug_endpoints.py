"""Metrics, and debug endpoints for tests: write counts, faults, outages, loss of history."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import Json, encode
from simcluster.apiserver.http.messages import json_response, read_body
from simcluster.apiserver.requests.object_writes import method_not_allowed
from simcluster.apiserver.storage.store import ObjectStore
from simcluster.ports import Outage


@dataclass(slots=True, kw_only=True)
class InjectedFault:
    """A fault of the next `count` requests to paths that begin with `path`.

    The response is a Status with `code`, and Retry-After if `retry_after_s` is set; code 0 resets
    the connection. A request first waits `delay_s`, and with code 200 it is then served.
    """

    path: str
    method: str = ""
    count: int = 1
    code: int = 500
    retry_after_s: int | None = None
    delay_s: float = 0.0

    def hits(self, method: str, path: str) -> bool:
        """Return whether the fault applies to the request, and count it if it does."""
        if self.count < 1 or not path.startswith(self.path):
            return False
        if self.method and self.method != method:
            return False
        self.count -= 1
        return True


_REASONS = {429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable"}


class FaultInjector:
    """The pending faults, and an outage: no request is answered."""

    def __init__(self) -> None:
        self.pending: list[InjectedFault] = []
        self.away_until = 0.0
        """By the monotonic clock."""

    def add(self, described: Json) -> None:
        """Add a fault from its JSON description; 400 for unknown fields."""
        try:
            self.pending.append(InjectedFault(**described))
        except TypeError as error:
            raise ApiError.bad_request(f"invalid fault: {error}") from error

    def reset_in_outage(self, request: web.BaseRequest) -> None:
        """Reset the request's connection while there is an outage."""
        if time.monotonic() < self.away_until:
            _reset(request)

    async def inject(self, request: web.BaseRequest) -> None:
        """Apply the first matching fault, if there is one."""
        hit = next(
            (fault for fault in self.pending if fault.hits(request.method, request.path)), None
        )
        if hit is None:
            return
        self.pending = [fault for fault in self.pending if fault.count > 0]
        await asyncio.sleep(hit.delay_s)
        if hit.code == 0:
            _reset(request)
        if hit.code != 200:
            reason = _REASONS.get(hit.code, "InternalError")
            raise ApiError(hit.code, reason, "injected fault", retry_after_s=hit.retry_after_s)


def _reset(request: web.BaseRequest) -> NoReturn:
    """Reset the request's connection."""
    if request.transport is not None:
        request.transport.abort()
    raise asyncio.CancelledError


_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)


class ApiServerMetrics:
    """The metrics, under the names of the Kubernetes API server."""

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
            "Request latency in seconds, without watches.",
            ("verb", "resource"),
            registry=self.registry,
            buckets=_BUCKETS_S,
        )
        self.watches = Gauge(
            "apiserver_longrunning_requests",
            "Open watches.",
            ("resource",),
            registry=self.registry,
        )

    def count(
        self, verb: str, resource: str, subresource: str, *, code: int, took_s: float
    ) -> None:
        """Count one request; the duration of a watch is not a latency and is left out."""
        self._requests.labels(verb, resource, subresource, str(code)).inc()
        if verb != "WATCH":
            self._seconds.labels(verb, resource).observe(took_s)

    def text(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self.registry)


def _outage(described: Json) -> Outage:
    """Return an outage from its JSON description; 400 for unknown fields."""
    try:
        return Outage(**described)
    except TypeError as error:
        raise ApiError.bad_request(f"invalid outage: {error}") from error


class DebugEndpoints:
    """Serves `/metrics` and `/debug/`: write counts, faults, outages, and the loss of history."""

    def __init__(
        self,
        store: ObjectStore,
        faults: FaultInjector,
        metrics: ApiServerMetrics,
        begin_outage: Callable[[Outage], None],
    ) -> None:
        self._store = store
        self._faults = faults
        self._metrics = metrics
        self._begin_outage = begin_outage

    async def respond(self, request: web.BaseRequest) -> web.Response:
        """Respond to one request; 405 for an unknown one."""
        match request.method, request.path:
            case "GET", "/metrics":
                return web.Response(body=self._metrics.text(), content_type="text/plain")
            case "GET", "/debug/writes":
                prefix = request.query.get("prefix", "")
                return json_response(encode(self._store.writes.all_counts(prefix)))
            case "POST", "/debug/faults":
                self._faults.add(await read_body(request))
            case "DELETE", "/debug/faults":
                self._faults.pending.clear()
            case "POST", "/debug/outage":
                self._begin_outage(_outage(await read_body(request)))
            case "POST", "/debug/compact":
                self._store.compact()
            case _:
                raise method_not_allowed(request.method)
        return json_response(b"{}")
