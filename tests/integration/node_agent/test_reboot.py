"""A node that boots: its kubelet admits pods again, and rejects those without a device plugin."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from shared.model.events.node_events import DeviceReported
from shared.model.events.pod_events import ResyncRequested
from shared.nats.bus import Bus
from simcluster.kubelet.containers.container_state import ContainerPhase
from tests.support.node_agent.agent import NUMBER, OneNodeCluster, one_node_cluster, share
from tests.support.node_agent.agent_process import agent_process
from tests.support.servers.nats import NatsServer
from tests.support.simcluster.kubelet import FAST, pod
from tests.support.waiting import until

REAL = replace(FAST, admits_after_s=0.8)
"""A kubelet of version 1.36.2 admitted its first pod 0.8 s after it created its socket."""
PATIENT = replace(FAST, admits_after_s=5.0)
"""On a loaded machine, an agent in a process of its own may register later than after 0.8 s."""
PODS = 6


@asynccontextmanager
async def pods_running() -> AsyncIterator[OneNodeCluster]:
    async with one_node_cluster(settings=REAL) as cluster:
        async with cluster.running():
            for number in range(PODS):
                cluster.bind(
                    pod(f"p{number}", limits={NUMBER: 1}), share(slot=number, fence=number + 1)
                )
            for number in range(PODS):
                await cluster.node.phase(f"p{number}", "Running")
        yield cluster


async def all_run(cluster: OneNodeCluster) -> None:
    """Wait until each pod was admitted anew and its container runs."""

    def running(name: str) -> bool:
        state = cluster.node.kubelet.state_of("default", name)
        assert cluster.node.pod(name)["status"]["phase"] != "Failed", cluster.message(name)
        return state is not None and state.containers["main"].phase == ContainerPhase.RUNNING

    for number in range(PODS):
        await until(partial(running, f"p{number}"))


class Notified(asyncio.DatagramProtocol):
    """Receives the notifications of an init system."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def datagram_received(self, data: bytes, _: object) -> None:
        self.messages.append(data.decode())


async def test_pods_are_admitted_again_if_the_agent_starts_before_the_kubelet() -> None:
    async with pods_running() as cluster:
        cluster.ledger.unavailable = True  # as NATS, which is not there yet
        async with cluster.running():
            await cluster.node.kubelet.reboot()

            await all_run(cluster)
            assert not cluster.refused


async def test_an_agent_without_nats_notifies_that_it_started_and_serves_the_kubelet() -> None:
    nats = NatsServer()  # not started yet, as when it is to run on the node that boots
    async with pods_running() as cluster:
        endpoint = await asyncio.get_running_loop().create_datagram_endpoint(
            Notified, str(cluster.root / "n"), family=1
        )
        environment = {
            "PATH": "/usr/bin",
            "PYTHONPATH": ":".join(sys.path),
            "NOTIFY_SOCKET": str(cluster.root / "n"),
        }
        async with agent_process(cluster, nats.url, environment):
            await until(lambda: endpoint[1].messages)
            cluster.node.kubelet.settings = PATIENT
            await cluster.node.kubelet.reboot()
            await all_run(cluster)
            assert not (cluster.root / "run.json").exists()

            await nats.start()
            try:
                await _reports(nats.url)
                run = await until((cluster.root / "run.json").exists)
            finally:
                nats.close()
        endpoint[0].close()

    assert run
    assert endpoint[1].messages[0].startswith("READY=1\n")


async def _reports(url: str) -> None:
    """Wait for the agent's report of its allocations."""
    async with Bus.connect(url, name="binder") as bus:
        inbox = await bus.subscribe([DeviceReported], group="binder")
        async with asyncio.timeout(60):
            await bus.publish([ResyncRequested(reason="test")])
            for delivered in await inbox.batch():
                assert len(delivered.events[0].allocations) == PODS
                delivered.confirm()
