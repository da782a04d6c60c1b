"""Whole binders on NATS: one announces and dies, the next evicts, reserves and binds."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from services.binder.metrics import EVICTIONS
from services.binder.pod_client import PodClient
from services.binder.preempt.rules import PreemptionRules
from services.binder.wiring import BinderPorts, build_binder
from shared.model.clock import SystemClock
from shared.nats.bus import Bus
from shared.runtime.runner import Runner
from shared.runtime.telemetry import Tracing
from tests.support.binder.claims import FakeClaims
from tests.support.binder.preemption import Scene, budget, scene
from tests.support.binder.world import PermissiveAgents
from tests.support.clock import FakeClock
from tests.support.servers.nats import nats_server
from tests.support.servers.valkey import ValkeyServer
from tests.support.waiting import until


class RealClock(FakeClock):
    """The machine's."""

    def now(self) -> float:
        return time.time()


@asynccontextmanager
async def binder(at: Scene, nats: str) -> AsyncIterator[None]:
    """Run one binder while the block lasts."""

    async with Bus.connect(nats, name="binder") as bus:
        made = build_binder(
            BinderPorts(
                ledger=at.ledger,
                pods=PodClient(at.kube),
                claims=FakeClaims(),
                agents=PermissiveAgents(bus),
                publish=bus.publish,
                clock=SystemClock(),
                host_clock=SystemClock(),
            ),
            rules=at.rules,
        )
        runner = Runner("binder", made, bus, Tracing("binder", None))
        started = asyncio.Event()
        running = asyncio.create_task(runner.run(started))
        try:
            async with asyncio.timeout(20):
                await started.wait()
            yield
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


async def test_a_binder_takes_over_from_one_that_had_announced(server: ValkeyServer) -> None:
    await server.ready()
    before = EVICTIONS.labels("a", "reclaimable", "b")._value.get()
    async with (
        nats_server() as nats,
        scene(server.url) as at,
        Bus.connect(nats.url, name="test") as bus,
    ):
        at.clock = RealClock()
        at.rules = PreemptionRules(notice_s=1.0, min_runtime_s=60)
        old = await at.running("old", mib=16_000)
        await at.waiting("new")

        async with binder(at, nats.url):
            await bus.publish([budget("a", reported_at=time.time())])
            await until(lambda: at.announced_for("old"))
        assert not await at.is_deleting("old")
        async with binder(at, nats.url):
            await until(lambda: at.is_deleting("old"))
            await at.terminate(old)
            await until(lambda: bound(at))

        [lease] = [each async for page in at.ledger.load_all() for each in page]
        assert lease.name == "new"
        assert EVICTIONS.labels("a", "reclaimable", "b")._value.get() == before + 1
        assert at.writes("old")["delete/eviction"] == 1


async def bound(at: Scene) -> bool:
    pod = await at.get_pod("new", "b")
    return pod is not None and pod["spec"].get("nodeName") == "a"
