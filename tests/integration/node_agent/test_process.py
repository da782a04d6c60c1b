"""The node agent as its own process: NATS, traces, metrics, kill -9."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from msgspec import structs

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
from tests.support.binder.node_binder import post
from tests.support.node_agent.agent import (
    NUMBER,
    OneNodeCluster,
    lease_of,
    one_node_cluster,
    share,
)
from tests.support.node_agent.agent_process import agent_process
from tests.support.servers.nats import NatsServer, nats_server
from tests.support.simcluster.kubelet import NODE, pod
from tests.support.waiting import until

TRACE = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


@dataclass(slots=True)
class Binder:
    """Consumes the agent's events and replies to its lease requests over NATS."""

    bus: Bus
    cluster: OneNodeCluster

    async def listen(self) -> None:
        inbox = await self.bus.subscribe(
            [DeviceReported, ShareActivated, ShareRefused], group="binder"
        )
        await self.bus.reply(LeasesRequest, "binder", "", self._reply)
        while True:
            for delivered in await inbox.batch():
                self.cluster.events.extend(delivered.events)
                delivered.confirm()

    async def _reply(self, request: LeasesRequest) -> LeasesReply:
        return await self.cluster.ledger.request(request, LeasesReply, timeout_s=1)


@asynccontextmanager
async def binder_of(cluster: OneNodeCluster, nats: NatsServer) -> AsyncIterator[Binder]:
    async with Bus.connect(nats.url, name="binder") as bus:
        binder = Binder(bus, cluster)
        listening = asyncio.create_task(binder.listen())
        try:
            yield binder
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)


@asynccontextmanager
async def process_of(
    cluster: OneNodeCluster, nats: NatsServer
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start the agent and wait until it is ready."""
    async with agent_process(cluster, nats.url) as process:
        run_file = cluster.root / "run.json"
        await until(lambda: run_file.exists() or process.returncode is not None)
        assert process.returncode is None, (cluster.root / "agent.log").read_text()
        await cluster.node.allocatable(NUMBER, 20)
        yield process


async def http_text(cluster: OneNodeCluster, path: str) -> str:
    address = json.loads((cluster.root / "run.json").read_text())["http"]
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}{path}") as got:
        return await got.text()


def spans_of(directory: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for file in directory.glob("*.jsonl")
        for line in file.read_text().splitlines()
    ]


async def test_an_agent_process_consumes_leases_and_publishes_allocations() -> None:
    async with (
        nats_server() as nats,
        one_node_cluster() as cluster,
        binder_of(cluster, nats) as binder,
    ):
        async with process_of(cluster, nats) as process:
            report = (await until(lambda: cluster.reported))[0]
            lease = cluster.bind(pod("one", limits={NUMBER: 1}), share(1, 3000), trace=TRACE)
            await binder.bus.publish([LeaseChanged(lease=lease)])
            await cluster.node.phase("one", "Running")
            activated = (await until(lambda: cluster.activated))[0]
            cluster.node.create(pod("stray", limits={NUMBER: 1}))
            refused = (await until(lambda: cluster.refused))[0]
            await binder.bus.publish([ResyncRequested(reason="test")])
            reports = await until(lambda: [r for r in cluster.reported if r.allocations])
            replies = [
                await binder.bus.request(
                    TerminationRequest(node=NodeName(NODE), pod=PodUid(uid)), TerminationReply
                )
                for uid in (lease.pod, "unknown")
            ]
            metrics = await http_text(cluster, "/metrics")
            await until(lambda: http_text(cluster, "/readyz"), lambda text: text == "ok\n")
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(30):
                code = await process.wait()
        (span,) = [s for s in spans_of(cluster.root / "traces") if s["name"] == "allocate devices"]

        assert [device.model for device in report.devices] == ["Tesla T4"] * 2
        assert cluster.env("one")["CUDA_DEVICE_MEMORY_LIMIT_0"] == "3000m"
        assert activated.allocation.lease == structs.replace(
            lease, activated_at=activated.allocation.activated_at
        )
        assert refused.name == "stray"
        assert reports[0].allocations[0] == activated.allocation
        assert [answer.terminated for answer in replies] == [False, True]
        assert 'leasehold_allocations_total{outcome="allocated"' in metrics
        assert 'leasehold_allocations_total{outcome="refused"' in metrics
        assert "leasehold_agent_leases 1.0" in metrics
        assert code == 0
        assert not list(cluster.node.device_plugins.glob("leasehold-*"))
        assert [span["trace"], span["parent"]] == TRACE.split("-")[1:3]
        assert span["trace"] in activated.trace
        assert span["attributes"]["k8s.pod.uid"] == lease.pod


async def test_an_agent_killed_between_lease_and_allocate_resumes_from_its_checkpoint() -> None:
    async with (
        nats_server() as nats,
        one_node_cluster() as cluster,
        binder_of(cluster, nats) as binder,
    ):
        async with process_of(cluster, nats) as process:
            await cluster.run_pod("one", share(0, 1000))
            process.kill()
            await process.wait()
        async with process_of(cluster, nats):
            await cluster.run_pod("three", share(0, 2000, slot=1, fence=2))
            await binder.bus.publish([ResyncRequested(reason="test")])
            reports = await until(lambda: [r for r in cluster.reported if len(r.allocations) == 2])

        assert {activated.name for activated in reports[0].allocations} == {"one", "three"}
        assert cluster.env("one")["CUDA_DEVICE_MEMORY_LIMIT_0"] == "1000m"
        assert cluster.env("three")["CUDA_DEVICE_MEMORY_LIMIT_0"] == "2000m"


async def test_known_leases_are_honoured_while_nats_is_down() -> None:
    async with (
        nats_server() as nats,
        one_node_cluster() as cluster,
        binder_of(cluster, nats) as binder,
        process_of(cluster, nats),
    ):
        await until(lambda: cluster.ledger.requests)
        obj = pod("one", limits={NUMBER: 1}, node=None)
        created = cluster.node.create(obj)["metadata"]
        lease = cluster.ledger.grant(lease_of(created["uid"], share(0, 1500), name="one"))
        await binder.bus.publish([LeaseChanged(lease=lease)])
        await until(lambda: http_text(cluster, "/metrics"), lambda text: "agent_leases 1.0" in text)
        nats.kill()
        post(cluster, "one")
        await cluster.node.phase("one", "Running")

        assert cluster.env("one")["CUDA_DEVICE_MEMORY_LIMIT_0"] == "1500m"
        await nats.start()
        await until(lambda: cluster.activated, limit_s=15)
