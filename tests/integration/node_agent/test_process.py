"""The node agent as its own process: NATS, traces, metrics, kill -9."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from shared.model.events.event import Event
from shared.model.events.node_events import DeviceReported, ShareActivated, ShareRefused
from shared.model.events.pod_events import LeaseChanged, ResyncRequested
from shared.model.events.request_reply import (
    LeasesReply,
    LeasesRequest,
    TerminationReply,
    TerminationRequest,
)
from shared.model.names import NodeName, PodUid
from shared.nats.bus import Bus
from tests.support.node_agent.agent import NUMBER, Ledger, Site, lease_of, share, site
from tests.support.servers.nats import NatsServer, nats_server
from tests.support.simcluster.kubelet import NODE, pod
from tests.support.waiting import until

TRACE = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


@dataclass(slots=True)
class Binder:
    """The other end of the bus."""

    bus: Bus
    ledger: Ledger
    heard: list[Event] = field(default_factory=list)

    async def listen(self) -> None:
        inbox = await self.bus.subscribe(
            [DeviceReported, ShareActivated, ShareRefused], durable="binder"
        )
        await self.bus.reply(LeasesRequest, "binder", "", self._tell)
        while True:
            for delivered in await inbox.batch():
                self.heard.extend(delivered.events)
                await delivered.ack()

    async def _tell(self, question: LeasesRequest) -> LeasesReply:
        return await self.ledger.request(question, LeasesReply, timeout_s=1)

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.heard if isinstance(event, kind)]


@asynccontextmanager
async def binder_of(at: Site, nats: NatsServer) -> AsyncIterator[Binder]:
    async with Bus.connect(nats.url, name="test binder") as bus:
        binder = Binder(bus, at.ledger)
        listening = asyncio.create_task(binder.listen())
        try:
            yield binder
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)


@asynccontextmanager
async def process_of(at: Site, nats: NatsServer) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start the agent and wait until it is ready."""
    settings = at.settings
    run_file = at.root / "run.json"
    run_file.unlink(missing_ok=True)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.node_agent",
        "--node", NODE,
        "--nats-url", nats.url,
        "--gpus", at.gpus,
        "--kubelet-dir", str(settings.kubelet_dir),
        "--kubeconfig", str(settings.kubeconfig),
        "--state-dir", str(settings.state_dir),
        "--run-file", str(run_file),
        "--trace-dir", str(at.root / "traces"),
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    log = asyncio.create_task(process.stderr.read())
    try:
        await until(lambda: run_file.exists() or process.returncode is not None, limit_s=30)
        assert process.returncode is None, (await log).decode()
        await at.node.allocatable(NUMBER, 20)
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            async with asyncio.timeout(30):
                await process.wait()
        await log


async def page(at: Site, path: str) -> str:
    address = json.loads((at.root / "run.json").read_text())["http"]
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}{path}") as got:
        return await got.text()


def spans_of(directory: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for file in directory.glob("*.jsonl")
        for line in file.read_text().splitlines()
    ]


async def test_an_agent_hears_leases_and_says_what_it_did_with_them() -> None:
    async with nats_server() as nats, site() as at, binder_of(at, nats) as binder:
        async with process_of(at, nats) as process:
            report = (await until(lambda: binder.of(DeviceReported)))[0]
            lease = at.bind(pod("one", limits={NUMBER: 1}), share(1, 3000), trace=TRACE)
            await binder.bus.publish([LeaseChanged(lease=lease)])
            await at.node.phase("one", "Running")
            told = (await until(lambda: binder.of(ShareActivated)))[0]
            at.node.create(pod("stray", limits={NUMBER: 1}))
            refused = (await until(lambda: binder.of(ShareRefused)))[0]
            await binder.bus.publish([ResyncRequested(reason="a test asks")])
            reports = await until(
                lambda: [r for r in binder.of(DeviceReported) if r.allocations], limit_s=5
            )
            ended = [
                await binder.bus.request(
                    TerminationRequest(node=NodeName(NODE), pod=PodUid(uid)), TerminationReply
                )
                for uid in (lease.pod, "unheard-of")
            ]
            metrics = await page(at, "/metrics")
            ready = await page(at, "/readyz")
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(30):
                code = await process.wait()
        (span,) = [s for s in spans_of(at.root / "traces") if s["name"] == "node-agent allocate"]

        assert [device.model for device in report.devices] == ["Tesla T4"] * 2
        assert at.env("one")["CUDA_DEVICE_MEMORY_LIMIT_0"] == "3000m"
        assert told.allocation.lease == lease
        assert refused.name == "stray"
        assert reports[0].allocations[0] == told.allocation
        assert [answer.terminated for answer in ended] == [False, True]
        assert 'leasehold_allocations_total{outcome="answered"' in metrics
        assert 'leasehold_allocations_total{outcome="refused"' in metrics
        assert "leasehold_agent_leases 1.0" in metrics
        assert ready == "ok\n"
        assert code == 0
        assert not list(at.node.device_plugins.glob("leasehold-*"))
        assert [span["trace"], span["parent"]] == TRACE.split("-")[1:3]
        assert span["trace"] in told.trace
        assert span["attributes"]["k8s.pod.uid"] == lease.pod


async def test_killed_between_lease_and_allocate_it_goes_on_where_it_was() -> None:
    async with nats_server() as nats, site() as at, binder_of(at, nats) as binder:
        async with process_of(at, nats) as process:
            at.bind(pod("one", limits={NUMBER: 1}), share(0, 1000))
            await at.node.phase("one", "Running")
            process.kill()
            await process.wait()
        async with process_of(at, nats):
            at.bind(pod("three", limits={NUMBER: 1}), share(0, 2000, slot=1, fence=2))
            await at.node.phase("three", "Running")
            await binder.bus.publish([ResyncRequested(reason="a test asks")])
            reports = await until(
                lambda: [r for r in binder.of(DeviceReported) if len(r.allocations) == 2],
                limit_s=5,
            )

        assert {told.name for told in reports[0].allocations} == {"one", "three"}
        assert at.env("one")["CUDA_DEVICE_MEMORY_LIMIT_0"] == "1000m"
        assert at.env("three")["CUDA_DEVICE_MEMORY_LIMIT_0"] == "2000m"


async def test_leases_already_told_are_honoured_while_nats_is_away() -> None:
    async with (
        nats_server() as nats,
        site() as at,
        binder_of(at, nats) as binder,
        process_of(at, nats),
    ):
        await until(lambda: at.ledger.questions)
        obj = pod("one", limits={NUMBER: 1}, node=None)
        created = at.node.create(obj)["metadata"]
        lease = at.ledger.grant(lease_of(created["uid"], share(0, 1500), name="one"))
        await binder.bus.publish([LeaseChanged(lease=lease)])
        await _known(at)
        nats.kill()
        await bind(at, "one")
        await at.node.phase("one", "Running")

        assert at.env("one")["CUDA_DEVICE_MEMORY_LIMIT_0"] == "1500m"
        await nats.start()
        await until(lambda: binder.of(ShareActivated), limit_s=15)


async def bind(at: Site, name: str) -> None:
    path = f"/api/v1/namespaces/default/pods/{name}/binding"
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": name},
        "target": {"apiVersion": "v1", "kind": "Node", "name": NODE},
    }
    async with at.api.client() as client, client.post(path, json=binding) as answer:
        assert answer.status < 300, await answer.text()


async def _known(at: Site) -> None:
    async with asyncio.timeout(30):
        while "leasehold_agent_leases 1.0" not in await page(at, "/metrics"):
            await asyncio.sleep(0.05)
