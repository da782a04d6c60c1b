"""A node agent beside a simulated kubelet: real unix sockets, real TLS, a real checkpoint file."""

import pytest

from services.node_agent.agent_timing import AgentTiming
from shared.model.errors import RequestError
from shared.model.names import NodeName
from simcluster.node_agent.gpus import uuid_of
from tests.support.node_agent.agent import MEMORY, NUMBER, one_node_cluster, share
from tests.support.simcluster.kubelet import NODE, container, pod
from tests.support.waiting import until

SLOW = 0.01
"""Rate of the agent's clock: a pause takes long, a slow machine does not."""


async def test_a_pod_without_a_lease_is_refused_at_once_with_the_reason() -> None:
    async with one_node_cluster(rate=SLOW) as cluster, cluster.running() as agent:
        began = agent.clock.ticks()
        cluster.node.create(pod("stray", limits={NUMBER: 1}))
        await cluster.node.phase("stray", "Failed")
        took_s = agent.clock.ticks() - began
        text = cluster.message("stray")
        refused = await until(lambda: cluster.refused)

    assert NUMBER in text
    assert "node-0" in text
    assert "holds no lease" in text
    assert refused[0].name == "stray"
    assert took_s < 1.0


async def test_a_pod_is_refused_with_the_reason_if_its_lease_cannot_be_requested() -> None:
    timing = AgentTiming(sight_s=4.0)
    async with one_node_cluster(rate=8, timing=timing) as cluster, cluster.running():
        cluster.ledger.unavailable = True
        cluster.node.create(pod("stray", limits={NUMBER: 1}))
        await cluster.node.phase("stray", "Failed")
        text = cluster.message("stray")

    assert "no reply within 4 s on whether pod default/stray" in text


async def test_24_known_leases_are_honoured_while_no_binder_replies() -> None:
    async with one_node_cluster() as cluster, cluster.running():
        cluster.ledger.unavailable = True
        await cluster.run_pod("one", share(0, 2000))


async def test_32_a_pod_that_sets_a_reserved_variable_is_refused_by_its_name() -> None:
    own = container("main", limits={NUMBER: 1}, env=[{"name": "LD_PRELOAD", "value": "/x.so"}])
    async with one_node_cluster() as cluster, cluster.running():
        cluster.bind(pod("one", containers=[own]), share(0, 2000))
        await cluster.node.phase("one", "Failed")
        text = cluster.message("one")
        refused = await until(lambda: cluster.refused)
        await until(lambda: cluster.annotation("one", "volcano.sh/bind-phase") == "failed")

    assert "container main of pod default/one sets LD_PRELOAD" in text
    assert "LD_PRELOAD" in refused[0].reason


async def test_37_annotations_follow_each_allocated_container() -> None:
    both = [container("a", limits={NUMBER: 1}), container("b", limits={NUMBER: 1})]
    async with one_node_cluster() as cluster, cluster.running():
        cluster.bind(
            pod("one", containers=both),
            share(0, 1000, container="a", slot=0),
            share(1, 2000, container="b", slot=0),
        )
        await cluster.node.phase("one", "Running")
        await until(lambda: cluster.annotation("one", "volcano.sh/bind-phase") == "success")

        assert cluster.annotation("one", "volcano.sh/vgpu-time") == str(2**64 - 1)
        assert "GPU" not in cluster.annotation("one", "volcano.sh/devices-to-allocate")
        assert cluster.env("one", "a")["CUDA_DEVICE_MEMORY_LIMIT_0"] == "1000m"
        assert cluster.env("one", "b")["CUDA_DEVICE_MEMORY_LIMIT_0"] == "2000m"


async def test_memory_served_in_units_is_allocated_in_units() -> None:
    async with (
        one_node_cluster(gpu_strategy="share", memory_factor=16) as cluster,
        cluster.running(),
    ):
        lease = share(1, 2048, unit_mib=16, slotted=False, slot=None, cores_percent=0)
        cluster.bind(pod("one", limits={MEMORY: 128}), lease, dialect="volcano-gpushare")
        await cluster.node.phase("one", "Running")
        held = await cluster.node.allocated_devices()
        activated = await until(lambda: cluster.activated)

    assert len(held["one", "main"]) == 128
    assert {one[:2] for one in held["one", "main"]} == {"1-"}
    assert len(activated[0].allocation.device_ids) == 1, "consecutive IDs are reported as a range"


async def test_22_a_refusal_takes_less_than_a_tenth_of_a_second() -> None:
    async with one_node_cluster(rate=SLOW) as cluster, cluster.running() as agent:
        began = agent.clock.ticks()
        with pytest.raises(
            RequestError, match="no pod in the kubelet's list waits for these devices"
        ):
            await agent.plugins.handler.allocate(NUMBER, [f"{uuid_of(NodeName(NODE), 0)}::0"])
        took_s = agent.clock.ticks() - began

    assert took_s < 0.1
