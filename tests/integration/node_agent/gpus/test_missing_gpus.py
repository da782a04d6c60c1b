"""GPUs that are missing or different when the node agent starts again."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import REGISTRY

from services.node_agent.records.device_guard import EXCEEDED
from services.node_agent.service import NodeAgent
from shared.model.device import Device
from shared.model.errors import RequestError
from shared.model.events.node_events import HealthChanged
from shared.model.names import NodeName
from simcluster.node_agent.gpus import uuid_of
from tests.support.node_agent.agent import (
    NUMBER,
    OneNodeCluster,
    handler_of,
    one_node_cluster,
    share,
)
from tests.support.simcluster.kubelet import NODE
from tests.support.waiting import until

QUICK: dict[str, Any] = {"rate": 50, "backoff_s": 10.0}
SECOND = uuid_of(NodeName(NODE), 1)
CORDONED = {"device_uuid": SECOND, "index": "1", "state": "cordoned"}
EXCLUDED = json.dumps({"nodeconfig": [{"name": NODE, "filterdevices": {"uuid": [SECOND]}}]})


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[OneNodeCluster]:
    async with one_node_cluster(**QUICK) as started:
        yield started


async def recorded(agent: NodeAgent) -> None:
    await until(lambda: agent.checkpoint.devices)


def inject(cluster: OneNodeCluster, **faults: str) -> None:
    cluster.inject(**faults)
    cluster.events.clear()


async def second_device(cluster: OneNodeCluster, fault: str) -> Device:
    def found() -> Device | None:
        devices = cluster.reported[-1].devices if cluster.reported else ()
        return next((d for d in devices if d.uuid == SECOND and fault in d.fault), None)

    device: Device = await until(found)
    return device


async def test_an_idle_gpu_that_is_missing_after_a_restart_is_reported_as_it_was_until_it_is_back(
    cluster: OneNodeCluster,
) -> None:
    async with cluster.running() as agent:
        await recorded(agent)
        (_, before) = agent.node.devices
    inject(cluster, gpu1="vanish")

    async with cluster.running():
        missing = await second_device(cluster, "NotListed")
        (event,) = await until(lambda: cluster.events_of(HealthChanged))
        shown = REGISTRY.get_sample_value("leasehold_device_health", CORDONED)
        inject(cluster)
        await until(lambda: [each.healthy for each in cluster.events_of(HealthChanged)] == [True])
        await until(lambda: all(device.healthy for device in cluster.reported[-1].devices))

    assert not missing.healthy
    assert (missing.index, missing.model, missing.memory_mib) == (1, before.model, 15360)
    assert (event.device, event.index, event.healthy) == (SECOND, 1, False)
    assert shown == 1


async def test_the_pods_of_a_missing_gpu_get_an_event_and_its_containers_do_not_start_again(
    cluster: OneNodeCluster,
) -> None:
    async with cluster.running() as agent:
        lease = await cluster.run_pod("one", share(1, 1000))
        await recorded(agent)
    inject(cluster, gpu1="vanish")
    cluster.ledger.unavailable = True

    async with cluster.running() as agent:
        await second_device(cluster, "NotListed")
        (event,) = await until(lambda: cluster.events_of(HealthChanged))
        (entry,) = agent.checkpoint.entries
        ids = entry.allocation.device_ids
        with pytest.raises(RequestError, match=r"GPU 1 \(.*\) is missing on the node: .*NotListed"):
            await handler_of(agent).pre_start_container(NUMBER, ids)

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
        await second_device(cluster, "Excluded")
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
        device = await second_device(cluster, EXCEEDED)
        agent.leases.end([lease.pod])
        cluster.ledger.leases.pop(lease.pod)
        await until(lambda: all(each.healthy for each in cluster.reported[-1].devices), limit_s=20)

    assert "its memory was 15360 MiB and is now 15000 MiB" in changed[0].fault
    assert (device.healthy, device.memory_mib) == (False, 15000)
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
