"""A real Jaeger 2 with the configuration of compose.yaml, read through its query API.

Its program is `cmd/jaeger` of github.com/jaegertracing/jaeger.
"""

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.servers.nats import free_port
from tests.support.servers.otlp import ReceivedSpan
from tests.support.waiting import until

PROGRAM = os.environ.get("JAEGER_PROGRAM") or shutil.which("jaeger")
MISSING = (
    "no Jaeger 2: put its program `jaeger` on PATH, or name it in JAEGER_PROGRAM "
    "(docs/versions.md says how to build it)"
)
CONFIG = Path(__file__).parents[3] / "k8s" / "monitoring" / "jaeger.yaml"


@dataclass(frozen=True, slots=True)
class Jaeger:
    http: str
    otlp: str
    """HOST:PORT that receives OTLP over gRPC."""

    async def find(self, service: str, **query: str | dict[str, str]) -> set[str]:
        """Return the IDs of traces with a span of the service that has all `tags`."""
        now = int(time.time() * 1e6)
        texts = {key: json.dumps(v) if isinstance(v, dict) else v for key, v in query.items()}
        hour = 3_600_000_000
        times = {"start": str(now - hour), "end": str(now + hour), "limit": "1000"}
        traces = await self._get("/api/traces", {"service": service, **times, **texts})
        return {trace["traceID"].zfill(32) for trace in traces}

    async def trace(self, trace_id: str) -> list[ReceivedSpan]:
        """Return the spans of a trace, or none if it is unknown."""
        try:
            [trace] = await self._get(f"/api/traces/{trace_id}", {})
        except aiohttp.ClientResponseError as error:
            if error.status == 404:
                return []
            raise
        processes = trace["processes"]
        return [
            _received(span, processes[span["processID"]]["serviceName"]) for span in trace["spans"]
        ]

    async def services(self) -> set[str]:
        return set(await self._get("/api/services", {}))

    async def _get(self, path: str, query: dict[str, str]) -> Any:
        async with (
            aiohttp.ClientSession(raise_for_status=True) as session,
            session.get(f"{self.http}{path}", params=query) as response,
        ):
            return (await response.json())["data"] or []


def _received(span: dict[str, Any], service: str) -> ReceivedSpan:
    tags = {tag["key"]: tag["value"] for tag in span["tags"]}
    parents = [ref for ref in span.get("references") or () if ref["refType"] == "CHILD_OF"]
    links = [ref for ref in span.get("references") or () if ref["refType"] != "CHILD_OF"]
    is_error = tags.get("error") is True or tags.get("otel.status_code") == "ERROR"
    return ReceivedSpan(
        trace=span["traceID"].zfill(32),
        span=span["spanID"].zfill(16),
        parent=parents[0]["spanID"].zfill(16) if parents else "",
        name=span["operationName"],
        service=service,
        attributes={key: _text(value) for key, value in tags.items()},
        error=str(tags.get("otel.status_description", "")) if is_error else None,
        links=frozenset(ref["traceID"].zfill(32) for ref in links),
    )


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@contextlib.asynccontextmanager
async def jaeger(program: str, log: Path) -> AsyncIterator[Jaeger]:
    http, otlp, grpc_query = (f"127.0.0.1:{free_port()}" for _ in range(3))
    endpoints = {
        "receivers.otlp.protocols.grpc.endpoint": otlp,
        "extensions.jaeger_query.http.endpoint": http,
        "extensions.jaeger_query.grpc.endpoint": grpc_query,
    }
    settings = [f"--set={key}={value}" for key, value in endpoints.items()]
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            program, f"--config={CONFIG}", *settings, stdout=file, stderr=subprocess.STDOUT
        )
    server = Jaeger(f"http://{http}", otlp)
    try:

        async def is_ready() -> bool:
            assert process.returncode is None, log.read_text()
            with contextlib.suppress(aiohttp.ClientError):
                await server.services()
                return True
            return False

        await until(is_ready)
        yield server
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
