"""Faulty GPUs: what kubelet, ledger and lease owners see, and recovery."""

from typing import Any

import pytest
from prometheus_client import REGISTRY

from services.node_agent.gpus.device_health import HealthState
from shared.model.device import Device, DeviceMode
from shared.model.events.node_events import HealthChanged, LeaseHolder
from shared.model.events.request_reply import UsageRequest
from shared.model.lease import ClaimAllocation
from shared.model.names import NodeName
from simcluster.node_agent.gpus import uuid_of
from tests.support.node_agent.agent import NUMBER, OneNodeCluster, lease_of, one_node_cluster, share
from tests.support.simcluster.kubelet import NODE
from tests.support.waiting import until

QUICK: dict[str, Any] = {"rate": 50, "backoff_s": 25.0, "hang_limit_s": 0.2}


def state_shown(uuid: str, index: int) -> dict[str, float | None]:
    def of(state: HealthState) -> float | None:
        labels = {"device_uuid": uuid, "index": str(index), "state": str(state)}
        return REGISTRY.get_sample_value("leasehold_device_health", labels)

    return {str(state): of(state) for state in HealthState if of(state)}


def device(cluster: OneNodeCluster, index: int) -> Device:
    found: Device = cluster.reported[-1].devices[index]
    return found


async def until_unhealthy(cluster: OneNodeCluster, index: int, state: str = "") -> Device:
    await until(lambda: cluster.reported and state in device(cluster, index).fault.split(":")[0])
    await until(lambda: not device(cluster, index).healthy)
    return device(cluster, index)


async def test_hami_core_41_an_xid_cordons_a_gpu_reports_its_leases_and_the_gpu_recovers() -> None:
    async with one_node_cluster(**QUICK) as cluster, cluster.running() as agent:
        allocation = ClaimAllocation(generation="g")
        own = share(1, container="gpu", slot=1)
        claim = cluster.ledger.grant(lease_of("claim", own, name="two", claim=allocation))
        agent.leases.observe([claim])
        lease = await cluster.run_pod("one", share(1))
        cluster.inject(gpu1="xid-79")
        await cluster.node.allocatable(NUMBER, 10)
        await cluster.node.allocatable("volcano.sh/vgpu-cores", 100)
        unhealthy = await until_unhealthy(cluster, 1, "cordoned")
        shown = state_shown(unhealthy.uuid, 1)
        await agent.usage.scan()
        _, second = (await agent.report_usage(UsageRequest(node=NodeName(NODE)))).hardware
        cluster.inject()
        await cluster.node.allocatable(NUMBER, 20)
        changes = cluster.events_of(HealthChanged)
        running = cluster.node.pod("one")["status"]["phase"]

    holders = {
        LeaseHolder(pod=lease.pod, namespace=lease.namespace, name="one"),
        LeaseHolder(pod=claim.pod, namespace=claim.namespace, name="two", claim=True),
    }
    assert unhealthy.fault == "cordoned: XidError: Xid 79, the GPU has fallen off the bus"
    assert [(one.index, one.healthy, set(one.holders)) for one in changes] == [
        (1, False, holders),
        (1, True, holders),
    ]
    assert changes[0].fault == "XidError: Xid 79, the GPU has fallen off the bus"
    assert running == "Running"
    assert shown == {"cordoned": 1.0}
    ((xid, meaning),) = [(one.number, one.meaning) for one in second.xids]
    assert (xid, meaning) == (79, "the GPU has fallen off the bus")
    labels = {"hw_id": unhealthy.uuid, "hw_type": "gpu", "error_type": "xid 79"}
    assert (REGISTRY.get_sample_value("hw_errors_total", labels) or 0) >= 1
    assert state_shown(unhealthy.uuid, 1) == {"healthy": 1.0}


async def test_environment_variables_decide_which_xids_are_critical(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DP_ENABLE_HEALTHCHECKS", "31")
    monkeypatch.setenv("DP_DISABLE_HEALTHCHECKS", "79")
    async with one_node_cluster(**QUICK) as cluster, cluster.running():
        cluster.inject(gpu0="xid-79", gpu1="xid-31")
        await until_unhealthy(cluster, 1, "cordoned")

    assert all(report.devices[0].healthy for report in cluster.reported)


@pytest.mark.parametrize("hanging", [("gpu1",), ("gpu0", "gpu1")])
async def test_a_hanging_gpu_stalls_neither_allocate_nor_the_others_and_recovers(
    hanging: tuple[str, ...],
) -> None:
    async with one_node_cluster(**QUICK) as cluster, cluster.running():
        cluster.inject(**dict.fromkeys(hanging, "hang"))
        await cluster.run_pod("meanwhile", share(0))
        unhealthy = await until_unhealthy(cluster, 1, "cordoned")
        await cluster.node.allocatable(NUMBER, 20 - 10 * len(hanging))
        cluster.inject()
        await cluster.node.allocatable(NUMBER, 20)

    assert "NoResponse" in unhealthy.fault


@pytest.mark.parametrize(
    ("gpus", "text", "reason", "after"),
    [
        ("2xT4", "vanish", "NotListed", {}),
        ("2xT4", "memory-8192", "MemoryChanged", {"memory_mib": 8192}),
        ("2xA100-40GB", "mode-flip", "ModeChanged", {"mode": DeviceMode.MIG}),
    ],
)
async def test_a_changed_gpu_is_cordoned_and_returns(
    gpus: str, text: str, reason: str, after: dict[str, Any]
) -> None:
    async with one_node_cluster(gpus, **QUICK) as cluster, cluster.running():
        before = device(cluster, 1)
        cluster.inject(gpu1=text)
        unhealthy = await until_unhealthy(cluster, 1, "cordoned")
        if not after:
            cluster.inject()
        await until(lambda: device(cluster, 1).healthy)
        healed = device(cluster, 1)

    assert reason in unhealthy.fault
    assert before.uuid == healed.uuid == uuid_of(NodeName(NODE), 1)
    assert {name: getattr(healed, name) for name in after} == after
