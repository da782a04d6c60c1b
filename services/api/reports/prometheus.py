"""The history, read from a Prometheus that scrapes Leasehold's services and node agents.

https://prometheus.io/docs/prometheus/latest/querying/api/#range-queries
"""

import json
import math
import re
from collections.abc import Iterable, Iterator

import aiohttp
import msgspec

from services.api.reports.history import (
    CLUSTER,
    DEVICE,
    RANGES,
    HistoryRange,
    RecordedValues,
    Subject,
)
from shared.model.errors import UNDECODABLE, UnavailableError
from shared.model.leases.lease import MIB

TIMEOUT = aiohttp.ClientTimeout(total=10.0)
MOST_BYTES = 8 * 2**20
COLUMN = "leasehold_column"
WAITING = "waiting"
OK = 200
METRIC = re.compile(r"(\w+)@")
WAITING_PODS = "sum by (reason) (max by (system, reason) (leasehold_waiting_pods))"
LEASED = {
    "memory": f"sum(max by (model, state) (leasehold_leased_memory_bytes)) / {MIB}",
    "cores": "100 * sum(max by (model, state) (leasehold_leased_cores))",
    "idle": "100 * sum(max by (model) (leasehold_idle_gpus))",
}
"""Each replica of the API exports them."""
OF_POD = "namespace, pod, exported_namespace, exported_pod, device_uuid"
"""Of what a pod has of a device; Prometheus may rename ours."""
IDLE_TIME = "leasehold_container_idle_seconds"
"""Init containers have none."""


def _most(metric: str) -> str:
    """Return the sum of the most that each pod has of a device at one time.

    That is what an init container has, or all others together.
    """
    running = f"sum by ({OF_POD}) ({metric}@ and {IDLE_TIME}@)"
    first = f"max by ({OF_POD}) ({metric}@ unless {IDLE_TIME}@)"
    both = f'label_replace({running}, "kind", "running", "", "") or {first}'
    return f"sum(max by ({OF_POD}) ({both}))"


AMOUNT_METRICS = {
    "memory": f"{_most('leasehold_container_memory_leased_bytes')} / {MIB}",
    "cores": f"100 * {_most('leasehold_container_cores_leased_ratio')}",
    "used_memory": f"sum(leasehold_container_memory_measured_bytes@ and {IDLE_TIME}@) / {MIB}",
    "used_cores": f"100 * sum(leasehold_container_cores_measured_ratio@ and {IDLE_TIME}@)",
    "idle": f"100 * sum(sum by ({OF_POD}) (leasehold_container_gpus_leased@)"
    f" * (min by ({OF_POD}) ({IDLE_TIME}@) > bool $))",
}
"""@: a selector; $: the time after which a share is idle.

What a pod has of a device is idle once all its containers are, without init containers.
"""
SENSOR_METRICS = {
    "temperature": "max(hw_temperature_celsius@)",
    "power": "max(hw_power_watts@)",
    "clock": "max(leasehold_gpu_sm_clock_hertz@) / 1e6",
    "busy": "100 * max(hw_gpu_utilization_ratio@)",
}


class _Series(msgspec.Struct):
    metric: dict[str, str] = {}
    values: list[tuple[float, str]] = []


class _Data(msgspec.Struct):
    result: list[_Series] = []


class _Reply(msgspec.Struct):
    data: _Data = msgspec.field(default_factory=_Data)
    error: str = ""


class Prometheus:
    name = "prometheus"
    longest = RANGES[-1]

    def __init__(self, url: str, *, idle_after_s: float) -> None:
        self.url = url.rstrip("/")
        self.idle_after_s = idle_after_s

    async def read(self, subject: Subject, within: HistoryRange, now: float) -> RecordedValues:
        """Raises UnavailableError with what Prometheus replies."""
        end = now // within.step_s * within.step_s
        parameters = {
            "query": " or ".join(queries_of(subject, self.idle_after_s)),
            "start": str(end - within.span_s),
            "end": str(end),
            "step": str(within.step_s),
        }
        columns: dict[str, dict[float, float]] = {}
        waiting: dict[str, dict[float, float]] = {}
        for series in await self._query(parameters):
            column = series.metric.get(COLUMN, "")
            reason = series.metric.get("reason", "")
            if column == WAITING:
                waiting[reason] = dict(_numbers(series.values))
            else:
                columns[column] = dict(_numbers(series.values))
        at = sorted(
            {instant for values in (*columns.values(), *waiting.values()) for instant in values}
        )
        return RecordedValues(at=at, columns=_aligned(columns, at), waiting=_aligned(waiting, at))

    async def _query(self, parameters: dict[str, str]) -> list[_Series]:
        try:
            async with (
                aiohttp.ClientSession(timeout=TIMEOUT) as session,
                session.post(f"{self.url}/api/v1/query_range", data=parameters) as response,
            ):
                body = await response.content.read(MOST_BYTES)
                while len(body) < MOST_BYTES and (more := await response.content.read(MOST_BYTES)):
                    body += more
                status = response.status
            reply = msgspec.json.decode(body, type=_Reply)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._failed(str(error) or "it does not respond") from error
        except UNDECODABLE as error:
            reason = f"it replies with status {status}, which is not that of its API: {error}"
            raise self._failed(reason) from error
        if status != OK:
            raise self._failed(f"it replies with status {status}: {reply.error}")
        return reply.data.result

    def _failed(self, reason: str) -> UnavailableError:
        return UnavailableError(f"--prometheus-url {self.url} cannot be read: {reason}")


def queries_of(subject: Subject, idle_after_s: float) -> Iterator[str]:
    """Yield a query for each column, and one for all waiting pods."""
    queries = dict(AMOUNT_METRICS)
    if subject.kind == CLUSTER:
        yield _labelled(WAITING_PODS, WAITING)
        queries |= LEASED
    if subject.kind == DEVICE:
        queries |= SENSOR_METRICS
    for column, query in queries.items():
        chosen = query.replace("$", f"{idle_after_s:g}")
        yield _labelled(METRIC.sub(lambda metric: _chosen(metric[1], subject), chosen), column)


def _labelled(query: str, column: str) -> str:
    return f'label_replace({query}, "{COLUMN}", "{column}", "", "")'


def _chosen(metric: str, subject: Subject) -> str:
    """Prometheus renames labels that it sets itself, unless it is configured to honor ours."""
    if subject.devices and subject.kind != CLUSTER:
        uuids = "|".join(map(re.escape, subject.devices))
        label = "hw_id" if metric.startswith("hw_") else "device_uuid"
        return f"{metric}{{{label}=~{json.dumps(uuids)}}}"
    if not subject.namespace:
        return metric
    names = {"namespace": subject.namespace, **({"pod": subject.pod} if subject.pod else {})}
    own = ",".join(f"{label}={json.dumps(value)}" for label, value in names.items())
    renamed = ",".join(f"exported_{label}={json.dumps(value)}" for label, value in names.items())
    return f'({metric}{{{own},exported_namespace=""}} or {metric}{{{renamed}}})'


def _numbers(values: Iterable[tuple[float, str]]) -> Iterator[tuple[float, float]]:
    for instant, text in values:
        number = float(text)
        if math.isfinite(number):
            yield instant, round(number, 1)


def _aligned(
    columns: dict[str, dict[float, float]], at: list[float]
) -> dict[str, list[float | None]]:
    return {name: [of.get(instant) for instant in at] for name, of in columns.items()}
