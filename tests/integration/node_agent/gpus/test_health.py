"""Faulty, missing and changed GPUs: what kubelet, ledger and lease owners see, and recovery."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import REGISTRY

from services.node_agent.gpus.device_faults import Xid
from services.node_agent.gpus.device_health import HealthState
from services.node_agent.records.device_guard import EXCEEDED
from services.node_agent.service import NodeAgent
from shared.model.devices.device import UNNAMED, Device
from shared.model.errors import RequestError
from shared.model.events.node_events import HealthChanged, LeaseHolder
from shared.model.events.request_reply import UsageRequest
from shared.model.leases.lease import ClaimAllocation
from shared.model.names import DeviceUuid, NodeName
from simcluster.node_agent.gpus import uuid_of
from tests.support.node_agent.agent import (
    NUMBER,
    OneNodeCluster,
    lease_of,
    one_node_cluster,
    share,
)
from tests.support.simcluster.kubelet import NODE
from tests.support.waiting import until

QUICK: dict[str, Any] = {"rate": 50, "backoff_s": 25.0, "hang_limit_s": 0.2}
SECOND = uuid_of(NodeName(NODE), 1)
EXCLUDED = json.dumps({"nodeconfig": [{"name": NODE, "filterdevices": {"uuid": [SECOND]}}]})


def state_shown(uuid: str, index: int) -> dict[str, float | None]:
    def of(state: HealthState) -> float | None:
        labels = {"device_uuid": uuid, "index": str(index), "state": str(state)}
        return REGISTRY.get_sample_value("leasehold_device_health", labels)

    return {str(state): of(state) for state in HealthState if of(state)}


async def until_unhealthy(cluster: OneNodeCluster, fault: str) -> Device:
    """Wait until the second GPU is reported with a fault."""

    def found() -> Device | None:
        devices = cluster.reported[-1].devices if cluster.reported else ()
        return next((d for d in devices if d.uuid == SECOND and fault in d.fault), None)

    unhealthy: Device = await until(found)
    assert not unhealthy.healthy
    return unhealthy


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
        unhealthy = await until_unhealthy(cluster, "cordoned")
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
    assert unhealthy.fault == f"cordoned: {Xid(unhealthy.uuid, 79).fault}"
    assert [(one.index, one.healthy, set(one.holders)) for one in changes] == [
        (1, False, holders),
        (1, True, holders),
    ]
    assert changes[0].fault == str(Xid(unhealthy.uuid, 79).fault)
    assert running == "Running"
    assert shown == {"cordoned": 1.0}
    ((xid, meaning),) = [(one.number, one.meaning) for one in second.xids]
    assert (xid, meaning) == (79, Xid(unhealthy.uuid, 79).meaning)
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
        await until_unhealthy(cluster, "cordoned")

    assert all(report.devices[0].healthy for report in cluster.reported)


@pytest.mark.parametrize("hanging", [("gpu1",), ("gpu0", "gpu1")])
async def test_a_hanging_gpu_stalls_neither_allocate_nor_the_others_and_recovers(
    hanging: tuple[str, ...],
) -> None:
    async with one_node_cluster(**QUICK) as cluster, cluster.running():
        cluster.inject(**dict.fromkeys(hanging, "hang"))
        await cluster.run_pod("meanwhile", share(0))
        unhealthy = await until_unhealthy(cluster, "cordoned")
        await cluster.node.allocatable(NUMBER, 20 - 10 * len(hanging))
        cluster.inject()
        await cluster.node.allocatable(NUMBER, 20)

    assert "NoResponse" in unhealthy.fault


# After a restart of the agent


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[OneNodeCluster]:
    async with one_node_cluster(**QUICK) as started:
        yield started


async def recorded(agent: NodeAgent) -> None:
    await until(lambda: agent.checkpoint.devices)


def inject(cluster: OneNodeCluster, **faults: str) -> None:
    cluster.inject(**faults)
    cluster.events.clear()


async def test_an_idle_gpu_that_is_missing_after_a_restart_is_reported_as_it_was_until_it_is_back(
    cluster: OneNodeCluster,
) -> None:
    async with cluster.running() as agent:
        await recorded(agent)
        (_, before) = agent.node.devices
    inject(cluster, gpu1="vanish")

    async with cluster.running():
        missing = await until_unhealthy(cluster, "NotListed")
        (event,) = await until(lambda: cluster.events_of(HealthChanged))
        shown = state_shown(SECOND, 1)
        inject(cluster)
        await until_unhealthy(cluster, "ListedAgain")
        await until(lambda: [each.healthy for each in cluster.events_of(HealthChanged)] == [True])
        await until(lambda: all(device.healthy for device in cluster.reported[-1].devices))

    assert (missing.index, missing.model, missing.memory_mib) == (1, before.model, 15360)
    assert (event.device, event.index, event.healthy) == (SECOND, 1, False)
    assert shown == {"cordoned": 1.0}


@pytest.mark.parametrize("fault", ["hang", "hang-unnamed"])
async def test_a_gpu_that_hangs_since_before_a_restart_does_not_count_as_removed(
    cluster: OneNodeCluster, fault: str
) -> None:
    async with cluster.running() as agent:
        await recorded(agent)
    inject(cluster, gpu1=fault)

    async with cluster.running():
        unhealthy = await until_unhealthy(cluster, "cordoned")
        cluster.inject()
        await until(lambda: all(device.healthy for device in cluster.reported[-1].devices))

    assert unhealthy.fault.startswith("cordoned: NoResponse: the driver lists GPU 1, and NVML")
    faults = [device.fault for report in cluster.reported for device in report.devices]
    assert not [fault for fault in faults if "NotListed" in fault]


@pytest.mark.parametrize(("fault", "uuid"), [("hang", SECOND), ("hang-unnamed", UNNAMED)])
async def test_a_gpu_that_hangs_while_an_agent_without_records_starts_is_reported_as_unread(
    cluster: OneNodeCluster, fault: str, uuid: DeviceUuid
) -> None:
    inject(cluster, gpu1=fault)

    async with cluster.running() as agent:
        (first, *_) = await until(lambda: cluster.reported)
        recorded_devices = await until(lambda: agent.checkpoint.devices)
        cluster.inject()
        await until(lambda: len(cluster.reported[-1].devices) == 2)
        last = cluster.reported[-1]

    assert [(gpu.uuid, gpu.index) for gpu in first.unread] == [(uuid, 1)]
    assert [device.index for device in recorded_devices] == [0]
    assert not last.unread
    assert all(device.healthy for device in last.devices)


async def test_a_gpu_that_hangs_and_is_excluded_is_not_reported(
    cluster: OneNodeCluster, tmp_path: Any
) -> None:
    config = tmp_path / "config.json"
    config.write_text(EXCLUDED)
    cluster.changes["node_config"] = config
    inject(cluster, gpu1="hang")

    async with cluster.running():
        await until(lambda: cluster.reported)

    assert not any(report.unread for report in cluster.reported)


async def test_the_pods_of_a_missing_gpu_get_an_event_and_its_containers_do_not_start_again(
    cluster: OneNodeCluster,
) -> None:
    async with cluster.running() as agent:
        lease = await cluster.run_pod("one", share(1, 1000))
        await recorded(agent)
    inject(cluster, gpu1="vanish")
    cluster.ledger.unavailable = True

    async with cluster.running() as agent:
        await until_unhealthy(cluster, "NotListed")
        (event,) = await until(lambda: cluster.events_of(HealthChanged))
        (entry,) = agent.checkpoint.entries
        ids = entry.allocation.device_ids
        with pytest.raises(RequestError, match=r"GPU 1 \(.*\) is missing on the node: .*NotListed"):
            await agent.plugins.handler.pre_start_container(NUMBER, ids)

    assert [holder.pod for holder in event.holders] == [lease.pod]


async def test_a_gpu_that_the_configuration_excludes_is_not_missed_once_nothing_holds_it(
    cluster: OneNodeCluster, tmp_path: Any
) -> None:
    config = tmp_path / "config.json"
    config.write_text(EXCLUDED)
    async with cluster.running() as agent:
        lease = await cluster.run_pod("one", share(1, 1000))
        await recorded(agent)
    cluster.changes["node_config"] = config
    cluster.events.clear()

    async with cluster.running() as agent:
        await until_unhealthy(cluster, "Excluded")
        cluster.node.store.delete("pods", "default", "one", grace_s=0)
        cluster.ledger.leases.pop(lease.pod)
        agent.leases.end([lease.pod])
        await until(lambda: len(cluster.reported[-1].devices) == 1, limit_s=20)


async def test_a_gpu_with_less_memory_than_its_leases_gets_no_share_until_they_end(
    cluster: OneNodeCluster,
) -> None:
    async with cluster.running() as agent:
        lease = await cluster.run_pod("one", share(1, 15360))
        await recorded(agent)
    inject(cluster, gpu1="memory-15000")

    async with cluster.running() as agent:
        changed = await until(lambda: cluster.events_of(HealthChanged))
        device = await until_unhealthy(cluster, EXCEEDED)
        agent.leases.end([lease.pod])
        cluster.ledger.leases.pop(lease.pod)
        await until(lambda: all(each.healthy for each in cluster.reported[-1].devices), limit_s=20)

    assert "its memory was 15360 MiB and is now 15000 MiB" in changed[0].fault
    assert device.memory_mib == 15000
    assert "its leases have 15360 MiB, and it has only 15000 MiB" in device.fault


async def test_a_changed_mode_is_noticed_over_a_restart() -> None:
    async with one_node_cluster("2xA100-40GB", **QUICK) as cluster:
        async with cluster.running() as agent:
            await recorded(agent)
        inject(cluster, gpu1="mode-flip")
        async with cluster.running():
            (event, *_) = await until(lambda: cluster.events_of(HealthChanged))

    assert "its mode was hami-core and is now mig" in event.fault


async def test_a_device_keeps_the_slots_that_containers_hold(cluster: OneNodeCluster) -> None:
    async with cluster.running() as agent:
        await cluster.run_pod("one", share(1, 1000, slot=6))
        await recorded(agent)
    cluster.changes["device_split_count"] = 2

    async with cluster.running(registered=False) as agent:
        await until(lambda: [device.slots for device in agent.node.devices] == [2, 7])

        assert f"{SECOND}::6" in agent.node.shown.served[NUMBER]
