"""A running API over a real NATS, a real Valkey and a ledger of its own."""

import asyncio
import contextlib
import json
import ssl
import tempfile
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from msgspec import structs

from services.api.http.http_server import HttpServer
from services.api.http.pod_objects import PodObjects
from services.api.http.read_api import ReadApi
from services.api.service import ApiService, ApiTiming
from shared.credentials.authorization import AnonymousAuthenticator, Authenticator, load_tokens
from shared.kubernetes.kinds.gpu_prices import PriceFile, Prices
from shared.ledger.budgets import Budgets
from shared.ledger.connection_pool import LedgerClock
from shared.ledger.leases import RedisLeases
from shared.ledger.preemptions import Preemptions
from shared.model.budgets.budget import HOUR_MS, Journal
from shared.model.budgets.cost_records import IDLE, USED, WHOLE, CostHour, CostMark
from shared.model.clock import SystemClock
from shared.model.events.event import Event
from shared.model.events.request_reply import UsageReply
from shared.model.leases.lease import Lease
from shared.model.names import Namespace, NodeName
from shared.nats.bus import Bus
from shared.runtime import health
from shared.runtime.runner import Runner
from shared.runtime.telemetry import Tracing
from tests.support.build import measurement
from tests.support.placer.ledger import ledger, reservation, reserve, share
from tests.support.servers.nats import nats_server
from tests.support.servers.valkey import valkey_server
from tests.support.waiting import until


@dataclass
class NodesUsage:
    """Reports the usage of nodes that a test sets; other nodes' agents do not reply."""

    nodes: dict[NodeName, UsageReply] = field(default_factory=dict)

    def measure(self, lease: Lease, **amounts: Any) -> None:
        """Have the agent of a lease's node report the usage of the lease's share."""
        measured = measurement(lease, **amounts)
        self.nodes[lease.node] = UsageReply(measured_at=0.0, shares=(measured,))

    async def __call__(self, nodes: Iterable[NodeName]) -> dict[NodeName, UsageReply | None]:
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
    server: HttpServer

    async def get(self, path: str, token: str = "") -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with self.client.get(self.url + path, headers=headers) as answer:
            text = await answer.text()
            kind = answer.content_type
            return answer.status, json.loads(text) if kind == "application/json" else text

    async def post(self, path: str, body: Any, token: str = "", **headers: str) -> tuple[int, Any]:
        if token:
            headers["Authorization"] = f"Bearer {token}"
        async with self.client.post(self.url + path, json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def state(self, token: str = "") -> Any:
        status, state = await self.get("/api/v1/state", token)
        assert status == 200
        return state

    async def shares(self, token: str = "") -> list[Any]:
        return [
            share for device in (await self.state(token))["devices"] for share in device["shares"]
        ]

    async def until_shares(self, count: int) -> list[Any]:
        listed: list[Any] = await until(self.shares, lambda shares: len(shares) == count)
        return listed

    async def record_costs(self, *used: str, idle: Sequence[str] = ()) -> None:
        """Record that each of these namespaces had a T4 for the whole hour before this one."""
        at_ms = await self.budgets.now_ms() // HOUR_MS * HOUR_MS
        whole = CostHour(at_ms - HOUR_MS, at_ms, HOUR_MS)
        for use, names in ((USED, used), (IDLE, idle)):
            for name in names:
                whole.add(Namespace(name), "T4", use, WHOLE * HOUR_MS)
                whole.device_ms["T4"] = whole.device_ms.get("T4", 0) + HOUR_MS
        names_of: Any = {"generation": "g", "known_generation": "", "cursor": "0-0", "last": "0-0"}
        journal = Journal(**names_of, lost=False, entries=(), horizon_ms=None)
        mark = CostMark(at_ms=at_ms, hours={at_ms - HOUR_MS: whole})
        assert await self.budgets.record_costs(journal, CostMark(), mark)

    async def publish(self, *events: Event) -> None:
        await self.bus.publish(events)


@contextlib.asynccontextmanager
async def running_api(
    authenticator: Authenticator | None = None,
    *,
    tokens: str = "",
    traces: Path | None = None,
    tls: ssl.SSLContext | None = None,
    servers: tuple[str, str] | None = None,
    beside: RunningApi | None = None,
    pods: PodObjects | None = None,
    prices: Prices | None = None,
) -> AsyncIterator[RunningApi]:
    """Run the API, by default on servers of its own; `tokens` are lines `TOKEN NAMESPACE`.

    One `beside` another is a second replica: it has the same ledger and the same NATS.
    """
    async with contextlib.AsyncExitStack() as stack:
        if tokens:
            file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "tokens"
            file.write_text(tokens)
            authenticator = load_tokens(file)
        enter = stack.enter_async_context
        if beside is not None:
            servers = beside.nats_url, ""
        if servers is None:
            valkey = stack.enter_context(valkey_server())
            await valkey.ready()
            servers = (await enter(nats_server())).url, valkey.url
        nats_url, redis_url = servers
        leases = beside.ledger if beside else await enter(ledger(redis_url, {"a": 2}))
        bus = await enter(Bus.connect(nats_url, name="test"))
        budgets = leases.part(Budgets)
        client = await enter(aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)))
        usage = NodesUsage()
        preemptions = leases.part(Preemptions)
        service = ApiService(
            leases,
            SystemClock(),
            read_usage=usage,
            preemptions=preemptions,
            ledger_clock=LedgerClock(),
            timing=ApiTiming(round_s=0.02, usage_s=0.05, preemptions_s=0.05, finished_s=0.05),
        )
        started = asyncio.Event()
        runner = Runner("api", service, bus, Tracing("api", None))
        task = asyncio.create_task(runner.run(started))
        api = ReadApi(
            service,
            budgets,
            bus,
            trace_url="http://j/{trace}",
            spans=traces,
            pods=pods,
            prices=PriceFile(prices=prices) if prices else None,
        )
        server = HttpServer(api, authenticator or AnonymousAuthenticator())
        async with health.served(
            server.application(), "127.0.0.1:0", tls=(lambda: tls) if tls else None
        ) as address:
            await until(lambda: started.is_set() and not service.unready_reason())
            url = f"http{'s' if tls else ''}://{address}"
            yield RunningApi(
                service, leases, bus, url, client, usage, preemptions, budgets, nats_url, server
            )
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def reserve_lease(
    shown: RunningApi,
    pod: str = "p1",
    gpu: int = 0,
    *,
    node: str = "a",
    cores: int | None = None,
    **names: Any,
) -> Lease:
    """Reserve a share; `names` are its namespace and its pod's name."""
    amounts = {} if cores is None else {"cores": cores}
    wanted = reservation(pod, share(node, gpu, **amounts), node=node)
    (lease,) = await reserve(shown.ledger, structs.replace(wanted, **names))
    return lease
