"""The history from a Prometheus: what it is asked, and what it may reply.

https://prometheus.io/docs/prometheus/latest/querying/api/
"""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qsl

import pytest
from aiohttp import web

from services.api.reports.history import CLUSTER, DEVICE, NAMESPACE, NODE, POD, Subject, range_of
from services.api.reports.prometheus import AMOUNT_METRICS, SENSOR_METRICS, Prometheus
from shared.model.errors import UnavailableError
from shared.model.names import DeviceUuid
from shared.runtime import health
from shared.runtime.bodies import BODY

HOUR = range_of("1h")


def matrix(*series: tuple[dict[str, str], list[tuple[float, str]]]) -> dict[str, Any]:
    result = [{"metric": metric, "values": values} for metric, values in series]
    return {"status": "success", "data": {"resultType": "matrix", "result": result}}


class Server:
    """Replies as a test sets, and keeps what it was asked."""

    def __init__(self, reply: Any, status: int = 200) -> None:
        self.reply = reply
        self.status = status
        self.asked: dict[str, str] = {}

    async def query_range(self, request: web.Request) -> web.Response:
        self.asked = dict(parse_qsl(request[BODY].decode()))
        if isinstance(self.reply, str):
            return web.Response(text=self.reply, status=self.status)
        return web.json_response(self.reply, status=self.status)


@asynccontextmanager
async def prometheus(server: Server) -> AsyncIterator[Prometheus]:
    application = web.Application()
    application.router.add_post("/prefix/api/v1/query_range", server.query_range)
    async with health.served(application, "127.0.0.1:0") as address:
        yield Prometheus(f"http://{address}/prefix/", idle_after_s=600)


async def test_the_columns_of_a_reply_are_aligned_and_waiting_pods_are_by_reason() -> None:
    def of(column: str, **labels: str) -> dict[str, str]:
        return {"leasehold_column": column, **labels}

    server = Server(
        matrix(
            (of("memory"), [(30.0, "4000"), (60.0, "8000.04")]),
            (of("used_memory"), [(60.0, "1600"), (90.0, "NaN")]),
            (of("waiting", reason="NoMemory"), [(60.0, "2")]),
            (of("waiting", reason="GpuQuota"), [(30.0, "1")]),
        )
    )

    async with prometheus(server) as source:
        found = await source.read(Subject(kind=CLUSTER), HOUR, 7_201.0)

    assert found.at == [30.0, 60.0]
    assert found.columns == {"memory": [4000, 8000], "used_memory": [None, 1600]}
    assert found.waiting == {"NoMemory": [None, 2], "GpuQuota": [1, None]}
    assert {name: server.asked[name] for name in ("start", "end", "step")} == {
        "start": "3600.0",
        "end": "7200.0",
        "step": "30.0",
    }


@pytest.mark.parametrize(
    ("subject", "selectors"),
    [
        (Subject(kind=CLUSTER), {""}),
        (
            Subject(kind=NODE, name="n", devices=(DeviceUuid("GPU-a.1"), DeviceUuid('G"|b'))),
            {r'{device_uuid=~"GPU\\-a\\.1|G\"\\|b"}'},
        ),
        (
            Subject(kind=DEVICE, name="GPU-a", devices=(DeviceUuid("GPU-a"),)),
            {r'{device_uuid=~"GPU\\-a"}', r'{hw_id=~"GPU\\-a"}'},
        ),
        (
            Subject(kind=NAMESPACE, name="team", namespace="team"),
            {'{namespace="team",exported_namespace=""}', '{exported_namespace="team"}'},
        ),
        (
            Subject(kind=POD, name="uid", namespace="team", pod="p"),
            {
                '{namespace="team",pod="p",exported_namespace=""}',
                '{exported_namespace="team",exported_pod="p"}',
            },
        ),
    ],
)
async def test_a_query_selects_the_series_of_its_subject(
    subject: Subject, selectors: set[str]
) -> None:
    server = Server(matrix())

    async with prometheus(server) as source:
        await source.read(subject, HOUR, 7_200.0)

    query = server.asked["query"]
    found = re.findall(
        r'(?:leasehold_(?:container|gpu)|hw)_\w+(\{(?:"(?:\\.|[^"\\])*"|[^}"])*\})?', query
    )
    assert set(found) == selectors
    columns = set(re.findall(r'"leasehold_column", "(\w+)"', query))
    expected = {*AMOUNT_METRICS, *(SENSOR_METRICS if subject.kind == DEVICE else ())}
    assert columns == expected | ({"waiting"} if subject.kind == CLUSTER else set())
    assert ("leasehold_leased_cores" in query) == (subject.kind == CLUSTER)


@pytest.mark.parametrize(
    ("reply", "status", "reason"),
    [
        (
            {"status": "error", "errorType": "bad_data", "error": "parse error"},
            400,
            "it replies with status 400: parse error",
        ),
        ("<html>Not found</html>", 404, "which is not that of its API"),
        ({"status": "success", "data": {"result": [{"values": "x"}]}}, 200, "not that of its API"),
    ],
)
async def test_a_reply_that_is_no_history_is_refused_with_its_reason(
    reply: Any, status: int, reason: str
) -> None:
    async with prometheus(Server(reply, status)) as source:
        with pytest.raises(UnavailableError, match=rf"--prometheus-url http.*{reason}"):
            await source.read(Subject(kind=CLUSTER), HOUR, 7_200.0)


async def test_a_prometheus_that_does_not_run_is_named() -> None:
    source = Prometheus("http://127.0.0.1:9", idle_after_s=600)

    with pytest.raises(UnavailableError, match="cannot be read: Cannot connect"):
        await source.read(Subject(kind=CLUSTER), HOUR, 7_200.0)
