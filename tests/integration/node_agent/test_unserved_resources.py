"""One resource of a node that the kubelet cannot allocate: only pods that request it wait."""

import asyncio
from typing import Any

import pytest
from msgspec import structs

from services.node_agent.agent_timing import AgentTiming
from services.node_agent.kubelet import registration
from services.node_agent.kubelet.device_checkpoint import PluginResources, read_kubelet_devices
from shared.model.errors import UnavailableError
from simcluster.kubelet.settings import NodeSettings
from tests.support.binder.node_binder import Binder, reserve
from tests.support.node_agent.agent import MEMORY, NUMBER, OneNodeCluster, one_node_cluster, share
from tests.support.simcluster.kubelet import pod
from tests.support.waiting import until

TRIGGER = "leasehold.dev/share"
BROKEN = "nvidia.com/gpu"
UNITS: dict[str, Any] = {"gpu_strategy": "share", "memory_factor": 16}


def registered(cluster: OneNodeCluster) -> frozenset[str]:
    """Return the resources in the kubelet's checkpoint that have or had a plugin."""
    devices = read_kubelet_devices(cluster.node.kubelet.files.root / "device-plugins")
    return frozenset((devices and devices.registered) or ())


async def test_a_resource_is_reported_as_newly_served_after_each_registration() -> None:
    def was_newly_served() -> bool:
        reports = [(NUMBER in r.served, NUMBER in r.newly_served) for r in cluster.reported]
        return (True, True) in reports and reports[-1] == (True, False)

    async with one_node_cluster(timing=AgentTiming(status_late_s=2)) as cluster, cluster.running():
        await until(was_newly_served)
        cluster.events.clear()
        await cluster.node.kubelet.restart()
        await until(was_newly_served)


async def test_one_resource_that_is_not_registered_holds_up_only_its_own_pods(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register = registration.register
    broken = [True]

    async def refuses_one(kubelet: Any, endpoint: str, resource: str) -> None:
        if resource == BROKEN and broken:
            raise UnavailableError(f"the kubelet did not register {resource}: Deadline Exceeded")
        await register(kubelet, endpoint, resource)

    monkeypatch.setattr(registration, "register", refuses_one)
    async with one_node_cluster() as cluster, cluster.running(registered=False):
        await cluster.node.allocatable(NUMBER, 20)
        binder = Binder(cluster)
        async with asyncio.timeout(30):
            await binder.bind(reserve(cluster, 1, share(0, 1000)))
        await cluster.node.phase("p1", "Running")

        binder.waits.clear()
        waiting = reserve(cluster, 2, share(0, 2000, slot=1), limits={BROKEN: 1})
        waits = asyncio.create_task(binder.bind(structs.replace(waiting, dialect="nvidia")))
        await until(lambda: binder.waits)
        assert set(binder.waits) == {f"not registered with the kubelet: {BROKEN}"}
        await until(lambda: BROKEN not in cluster.reported[-1].served, limit_s=20)
        assert NUMBER in cluster.reported[-1].served
        broken.clear()
        async with asyncio.timeout(60):
            await waits
        await cluster.node.phase("p2", "Running")
        await until(lambda: BROKEN in cluster.reported[-1].served)


async def test_no_pod_comes_before_it_is_known_how_the_kubelet_allocates_its_amounts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_look = asyncio.Event()
    refresh = PluginResources.refresh

    async def late(resources: PluginResources, amounts: frozenset[str]) -> None:
        await may_look.wait()
        await refresh(resources, amounts)

    monkeypatch.setattr(PluginResources, "refresh", late)
    async with one_node_cluster() as cluster, cluster.running(registered=False) as agent:
        await until(lambda: all(one.is_served for one in agent.plugins.endpoints.values()))
        assert TRIGGER in agent.plugins.unserved()
        may_look.set()
        await until(lambda: not agent.plugins.unserved())


async def test_a_node_that_served_units_runs_new_pods_when_the_old_ones_have_ended() -> None:
    slow = NodeSettings(retry_s=0.05, back_off_s=0.05, plugin_grace_s=2.0)
    facts = {"slotted": False, "slot": None, "cores_percent": 0, "unit_mib": 16}
    async with one_node_cluster(settings=slow, rate=20) as cluster:
        cluster.changes.update(UNITS)
        async with cluster.running():
            old = cluster.bind(
                pod("old", limits={MEMORY: 64}), share(0, 1024, **facts), dialect="volcano-gpushare"
            )
            await cluster.node.phase("old", "Running")
        cluster.changes["gpu_strategy"] = "auto"
        async with cluster.running():
            binder = Binder(cluster)
            limits = {MEMORY: 64, TRIGGER: 1}
            lease = reserve(cluster, 1, share(1, 1024, **facts), limits=limits)
            waits = asyncio.create_task(
                binder.bind(structs.replace(lease, dialect="volcano-gpushare"))
            )
            await until(lambda: binder.waits)
            async with asyncio.timeout(30):
                await binder.bind(reserve(cluster, 2, share(1, 1000)))
            await cluster.node.phase("p2", "Running")
            await until(lambda: MEMORY not in registered(cluster), limit_s=20)
            await cluster.node.kubelet.restart()
            await until(lambda: MEMORY not in registered(cluster), limit_s=20)
            seen = len(binder.waits)
            why = f"the kubelet still allocates {MEMORY} by device plugin"
            await until(lambda: len(binder.waits) > seen + 40 and why in binder.waits[-1])
            assert cluster.node.pod("old")["status"]["phase"] == "Running"
            assert not waits.done()

            await cluster.delete_pod("old")
            await cluster.release(old)
            async with asyncio.timeout(60):
                await waits
            await cluster.node.phase("p1", "Running")
            assert cluster.env("p1")["VOLCANO_GPU_ALLOCATED"] == "1024"
