"""An agent that is replaced while pods arrive: the kubelet refuses none of them."""

import asyncio
from collections.abc import Iterable

import pytest
from msgspec import structs

from services.node_agent.agent_timing import AgentTiming
from services.node_agent.allocate import admission_window
from services.node_agent.allocate.admission_window import DRAINING
from services.node_agent.records import checkpoint
from services.node_agent.service import NodeAgent
from shared.model.devices.node import AGENT_STOPPING
from shared.model.events.request_reply import BindRequest
from shared.model.leases.lease import LeaseState, Share
from shared.model.names import NodeName
from simcluster.kubelet.devices.plugin_client import PluginConnection
from tests.support.binder.node_binder import Binder, post, reserve
from tests.support.node_agent.agent import NUMBER, OneNodeCluster, lease_of, one_node_cluster, share
from tests.support.simcluster.kubelet import NODE, pod
from tests.support.waiting import until

PATIENT = AgentTiming(drain_s=600.0)


async def test_fifty_pods_arrive_while_the_agent_is_restarted_and_none_is_refused() -> None:
    async with one_node_cluster("8xA100-80GB", timing=PATIENT) as cluster:
        binder = Binder(cluster)
        async with cluster.running() as agent:
            warm = reserve(cluster, 50, _share(50))
            await binder.bind(warm)
            await cluster.node.phase("p50", "Running")
            await agent.drain()
        burst = asyncio.create_task(_burst(cluster, binder))
        try:
            for _ in range(4):
                async with cluster.running(registered=False) as agent:
                    await served_one_more(cluster, burst)
                    await agent.drain()
                await cluster.node.allocatable(NUMBER, 0)  # the kubelet has seen that it is gone
            async with cluster.running():
                await burst
                for n in range(50):
                    await cluster.node.phase(f"p{n}", "Running")
        finally:
            burst.cancel()

        assert not cluster.refused
        assert binder.waits
        assert all(
            cluster.env(f"p{n}")["CUDA_DEVICE_MEMORY_LIMIT_0"] == f"{1000 + n}m" for n in range(50)
        )


def _share(n: int) -> Share:
    return share(n % 8, 1000 + n, slot=n // 8, fence=n // 8 + 1, device_mib=81_920)


async def served_one_more(cluster: OneNodeCluster, burst: asyncio.Task[None]) -> None:
    before = len(cluster.activated)
    await until(lambda: len(cluster.activated) > before or burst.done(), limit_s=60)


async def _burst(cluster: OneNodeCluster, binder: Binder) -> None:
    """Bind 50 pods, at most five at once."""
    places = asyncio.Semaphore(5)

    async def bind(n: int) -> None:
        async with places:
            await binder.bind(reserve(cluster, n, _share(n)))

    async with asyncio.TaskGroup() as group:
        for n in range(50):
            group.create_task(bind(n))


async def draining(cluster: OneNodeCluster, agent: NodeAgent) -> asyncio.Task[None]:
    """Stop the agent, and return once it has ended or looked three times for what it waits for."""
    drain = asyncio.create_task(agent.drain())
    requests = len(cluster.ledger.requests)
    await until(lambda: drain.done() or len(cluster.ledger.requests) > requests + 3)
    return drain


async def test_a_draining_agent_reports_it_and_serves_pods_in_flight() -> None:
    async with one_node_cluster(timing=PATIENT) as cluster, cluster.running() as agent:
        obj = pod("late", limits={NUMBER: 1}, node=None)
        uid = cluster.node.create(obj)["metadata"]["uid"]
        lease = cluster.ledger.grant(lease_of(uid, share(0, 2000), name="late"))
        drain = await draining(cluster, agent)
        await until(lambda: cluster.reported[-1].served == (AGENT_STOPPING,))
        reply = await agent.admit_binds(BindRequest(node=NodeName(NODE), leases=(lease,)))
        assert not drain.done(), "the pod of the bound lease has no devices yet"
        post(cluster, "late")
        await cluster.node.phase("late", "Running")
        async with asyncio.timeout(30):
            await drain

    assert reply.deferred_pods == (uid,)
    assert reply.reason == DRAINING


@pytest.mark.parametrize("binders_answer", [True, False])
async def test_a_draining_agent_waits_for_admitted_binds_that_are_not_committed(
    binders_answer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_window, "PERMIT_S", 600.0)
    async with one_node_cluster(timing=PATIENT) as cluster, cluster.running() as agent:
        obj = pod("slow", limits={NUMBER: 1}, node=None)
        uid = cluster.node.create(obj)["metadata"]["uid"]
        bound = lease_of(uid, share(0, 2000), name="slow")
        reserved = structs.replace(bound, state=LeaseState.RESERVED, version=bound.version - 1)
        reply = await agent.admit_binds(BindRequest(node=NodeName(NODE), leases=(reserved,)))
        cluster.ledger.unavailable = not binders_answer
        drain = await draining(cluster, agent)
        waits = not drain.done()
        await cluster.push_lease(cluster.ledger.grant(bound))
        post(cluster, "slow")
        await cluster.node.phase("slow", "Running")
        async with asyncio.timeout(30):
            await drain

    assert reply.deferred_pods == ()
    assert waits, "the binder has not committed the lease yet"


async def test_a_draining_agent_waits_until_a_container_with_devices_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_sandbox = asyncio.Event()
    calls = 0
    pre_start = PluginConnection.pre_start

    async def late(connection: PluginConnection, devices: Iterable[str]) -> None:
        nonlocal calls
        calls += 1
        await has_sandbox.wait()
        await pre_start(connection, devices)

    monkeypatch.setattr(PluginConnection, "pre_start", late)
    monkeypatch.setattr(checkpoint, "START_S", 600.0)
    async with one_node_cluster(timing=PATIENT) as cluster, cluster.running() as agent:
        uid = cluster.node.create(pod("new", limits={NUMBER: 1}))["metadata"]["uid"]
        cluster.ledger.grant(lease_of(uid, share(0, 2000), name="new"))
        await until(lambda: calls > 0)
        drain = await draining(cluster, agent)
        waits = not drain.done()
        has_sandbox.set()
        async with asyncio.timeout(30):
            await drain
        await cluster.node.phase("new", "Running")

    assert waits, "the kubelet is still to call PreStartContainer"
    assert calls == 1


async def test_a_draining_agent_does_not_wait_for_missing_binders() -> None:
    async with one_node_cluster(timing=PATIENT) as cluster, cluster.running() as agent:
        cluster.ledger.unavailable = True
        cluster.ledger.grant(lease_of("some-uid"))
        async with asyncio.timeout(30):
            await agent.drain()


HASTY = AgentTiming(drain_s=0.0)


def bind_unseen(cluster: OneNodeCluster) -> None:
    """Bind a pod while the kubelet does not watch its pods."""
    cluster.node.kubelet.api.lose()
    cluster.node.kubelet.api.there.set()
    cluster.bind(pod("late", limits={NUMBER: 1}), share(0, 2000))


async def test_a_draining_agent_waits_for_a_kubelet_that_reads_its_pods_late() -> None:
    async with one_node_cluster(timing=HASTY) as cluster, cluster.running() as agent:
        bind_unseen(cluster)
        drain = await draining(cluster, agent)
        waits = not drain.done()
        cluster.node.kubelet.api.find()
        await cluster.node.phase("late", "Running")
        async with asyncio.timeout(30):
            await drain

    assert waits


async def test_a_draining_agent_does_not_wait_for_a_kubelet_that_is_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with one_node_cluster(timing=HASTY) as cluster, cluster.running() as agent:
        bind_unseen(cluster)
        await cluster.node.kubelet._stop()
        await until(agent.plugins.unready_reason)
        async with asyncio.timeout(30):
            await agent.drain()

    assert "which the kubelet will refuse: default/late" in caplog.text
