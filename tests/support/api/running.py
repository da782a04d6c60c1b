"""A running API over a real NATS, a real Valkey and a ledger of its own."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from services.api.http_server import HttpServer
from services.api.read_api import ReadApi, SpanDirectory
from services.api.service import ApiService, ApiTiming
from shared.credentials.authorization import AnonymousAuthenticator, Authenticator
from shared.ledger.budgets import Budgets
from shared.ledger.leases import RedisLeases
from shared.ledger.preemptions import Preemptions
from shared.model.clock import SystemClock
from shared.model.events.event import Event
from shared.model.lease import Lease, ShareMeasurement
from shared.model.names import NodeName
from shared.nats.bus import Bus
from shared.runtime import health
from shared.runtime.runner import Runner
from shared.runtime.telemetry import Tracing
from tests.support.placer.ledger import ledger, reservation, reserve, share
from tests.support.servers.nats import nats_server
from tests.support.servers.valkey import valkey_server
from tests.support.waiting import until


@dataclass
class NodesUsage:
    """Reports the usage of nodes that a test sets; other nodes' agents do not reply."""

    nodes: dict[NodeName, tuple[ShareMeasurement, ...]] = field(default_factory=dict)

    def measure(self, lease: Lease, **amounts: Any) -> None:
        """Have the agent of a lease's node report the usage of the lease's share."""
        (share,) = lease.shares
        measured = ShareMeasurement(
            pod=lease.pod,
            namespace=lease.namespace,
            name=lease.name,
            container=share.container,
            device=share.device,
            **amounts,
        )
        self.nodes[lease.node] = (measured,)

    async def __call__(
        self, nodes: Iterable[NodeName]
    ) -> dict[NodeName, tuple[ShareMeasurement, ...] | None]:
        return {node: self.nodes.get(node) for node in nodes}


@dataclass
class RunningApi:
    """A running API, its ledger and its bus."""

    service: ApiService
    ledger: RedisLeases
    bus: Bus
    url: str
    client: aiohttp.ClientSession
    usage: NodesUsage
    preemptions: Preemptions
    budgets: Budgets
    nats_url: str

    async def get(self, path: str, token: str = "") -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with self.client.get(self.url + path, headers=headers) as answer:
            text = await answer.text()
            kind = answer.content_type
            return answer.status, json.loads(text) if kind == "application/json" else text

    async def state(self, token: str = "") -> Any:
        status, state = await self.get("/api/v1/state", token)
        assert status == 200
        return state

    async def shares(self, token: str = "") -> list[Any]:
        return [one for device in (await self.state(token))["devices"] for one in device["shares"]]

    async def until_shares(self, count: int) -> list[Any]:
        found: list[Any] = await until(self.shares, lambda shares: len(shares) == count)
        return found

    async def publish(self, *events: Event) -> None:
        await self.bus.publish(events)


@contextlib.asynccontextmanager
async def running_api(
    authenticator: Authenticator | None = None,
    *,
    traces: Path | None = None,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[RunningApi]:
    async with nats_server() as nats:
        with valkey_server() as valkey:
            await valkey.ready()
            async with (
                ledger(valkey.url, {"a": 2}) as leases,
                Bus.connect(nats.url, name="test") as bus,
                Budgets.connect(valkey.url) as store,
                aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as client,
            ):
                usage, preemptions = NodesUsage(), Preemptions(leases._connection)
                board = ApiService(
                    leases,
                    SystemClock(),
                    read_usage=usage,
                    preemptions=preemptions,
                    timing=ApiTiming(round_s=0.02, usage_s=0.05, preemptions_s=0.05),
                )
                runner = Runner("api", board, bus, Tracing("api", None))
                started = asyncio.Event()
                task = asyncio.create_task(runner.run(started))
                api = ReadApi(
                    board,
                    store,
                    bus,
                    trace_url="http://j/{trace}",
                    spans=SpanDirectory(traces) if traces else None,
                )
                pages = HttpServer(api, authenticator or AnonymousAuthenticator())
                async with health.served(pages.application(), "127.0.0.1:0", tls=tls) as address:
                    await until(lambda: started.is_set() and not board.unready_reason())
                    url = f"http{'s' if tls else ''}://{address}"
                    yield RunningApi(
                        board, leases, bus, url, client, usage, preemptions, store, nats.url
                    )
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task


async def reserve_lease(shown: RunningApi, pod: str = "p1", gpu: int = 0) -> Lease:
    (lease,) = await reserve(shown.ledger, reservation(pod, share("a", gpu)))
    return lease
