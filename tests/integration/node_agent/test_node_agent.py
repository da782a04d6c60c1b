"""A node agent beside a simulated kubelet: real unix sockets, real TLS, a real checkpoint file."""

import asyncio
import os

import pytest

from shared.model.errors import RequestError
from shared.model.names import NodeName
from simcluster.node_agent.gpus import uuid_of
from tests.support.node_agent.agent import MEMORY, NUMBER, handler_of, one_node_cluster, share
from tests.support.simcluster.kubelet import NODE, container, pod
from tests.support.waiting import until

REPEATS = int(os.environ.get("LEASEHOLD_TEST_REPEATS", "2"))


async def test_a_pod_gets_the_limits_and_mounts_of_its_lease() -> None:
    async with one_node_cluster() as cluster, cluster.running():
        lease = await cluster.run_pod("one", share(1, 3000, cores_percent=50, slot=4))
        env = cluster.env("one")
        held = await cluster.node.allocated_devices()
        mounts = cluster.node.container("one").mounts
        activated = await until(lambda: cluster.activated)

    assert env["NVIDIA_VISIBLE_DEVICES"] == uuid_of(NodeName(NODE), 1)
    assert env["CUDA_DEVICE_MEMORY_LIMIT_0"] == "3000m"
    assert env["CUDA_DEVICE_SM_LIMIT"] == "50"
    assert held["one", "main"] == {f"{uuid_of(NodeName(NODE), 1)}::4"}
    assert "/usr/local/vgpu/libvgpu.so" in str(mounts)
    assert activated[0].allocation.pod == lease.pod


async def test_a_pod_without_a_lease_is_refused_at_once_with_the_reason() -> None:
    async with one_node_cluster() as cluster, cluster.running():
        began = asyncio.get_running_loop().time()
        cluster.node.create(pod("stray", limits={NUMBER: 1}))
        await cluster.node.phase("stray", "Failed")
        took_s = asyncio.get_running_loop().time() - began
        text = cluster.message("stray")
        refused = await until(lambda: cluster.refused)

    assert NUMBER in text
    assert "node-0" in text
    assert "holds no lease" in text
    assert refused[0].name == "stray"
    assert took_s < 1.0


async def test_a_pod_is_refused_with_the_reason_if_its_lease_cannot_be_requested() -> None:
    async with one_node_cluster(rate=8) as cluster, cluster.running():
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


async def test_03_a_gpushare_pod_gets_its_three_variables_and_the_assigned_annotation() -> None:
    async with one_node_cluster() as cluster, cluster.running():
        lease = share(1, 1024, slotted=False, slot=None, cores_percent=0)
        limits = {MEMORY: 1024, "leasehold.dev/share": 1}
        cluster.bind(pod("one", limits=limits), lease, dialect="volcano-gpushare")
        await cluster.node.phase("one", "Running")
        env = cluster.env("one")
        await until(lambda: cluster.annotation("one", "volcano.sh/gpu-assigned") == "true")
        held = await cluster.node.allocated_devices()
        activated = await until(lambda: cluster.activated)

    assert env["NVIDIA_VISIBLE_DEVICES"] == "1"
    assert env["VOLCANO_GPU_ALLOCATED"] == "1024"
    assert env["VOLCANO_GPU_MEMORY_TOTAL"] == "15360"
    assert [one.partition("::")[0] for one in held["one", "main"]] == [uuid_of(NodeName(NODE), 1)]
    assert activated[0].allocation.resource == "leasehold.dev/share"


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


async def test_an_app_container_reuses_the_device_ids_of_an_init_container() -> None:
    limits = {MEMORY: 500, "leasehold.dev/share": 1}
    init = container("first", limits=limits)
    async with one_node_cluster() as cluster, cluster.running():
        lease = {"slotted": False, "slot": None, "cores_percent": 0}
        cluster.bind(
            pod("one", limits=limits, initContainers=[init]),
            share(0, 500, container="first", init=True, **lease),
            share(0, 500, **lease),
            dialect="volcano-gpushare",
        )
        await cluster.node.phase("one", "Running")
        activated = await until(lambda: len(cluster.activated) == 2 and cluster.activated)

    assert [event.allocation.container for event in activated] == ["first", "main"]
    assert activated[0].allocation.device_ids == activated[1].allocation.device_ids


async def test_39_thirty_pods_at_once_each_get_their_own_limits() -> None:
    for _ in range(REPEATS):
        async with one_node_cluster("4xA100-80GB") as cluster, cluster.running():
            for n in range(30):
                cluster.bind(
                    pod(f"p{n}", limits={NUMBER: 1}),
                    share(n % 4, 1000 + n, slot=n // 4, fence=n // 4 + 1),
                    lease_known=n % 2 == 0,
                )
            for n in range(30):
                await cluster.node.phase(f"p{n}", "Running")
            held = await cluster.node.allocated_devices()

            for n in range(30):
                assert cluster.env(f"p{n}")["CUDA_DEVICE_MEMORY_LIMIT_0"] == f"{1000 + n}m"
                assert held[f"p{n}", "main"] == {f"{uuid_of(NodeName(NODE), n % 4)}::{n // 4}"}
            assert not cluster.refused


async def test_22_a_refusal_takes_less_than_a_tenth_of_a_second() -> None:
    async with one_node_cluster() as cluster, cluster.running() as agent:
        loop = asyncio.get_running_loop()
        took: list[float] = []
        for _ in range(3):
            began = loop.time()
            with pytest.raises(
                RequestError, match="no pod in the kubelet's list waits for these devices"
            ):
                await handler_of(agent).allocate(NUMBER, [f"{uuid_of(NodeName(NODE), 0)}::0"])
            took.append(loop.time() - began)

    assert min(took) < 0.1


async def test_a_start_with_devices_that_were_not_allocated_is_refused() -> None:
    async with one_node_cluster() as cluster, cluster.running() as agent:
        await cluster.run_pod("one", share(0, 1000))
        ids = list((await cluster.node.allocated_devices())["one", "main"])
        await handler_of(agent).pre_start_container(NUMBER, ids)
        free = [f"{uuid_of(NodeName(NODE), 1)}::7"]

        with pytest.raises(
            RequestError, match="with no container, and they were allocated to no container"
        ):
            await handler_of(agent).pre_start_container(NUMBER, free)


async def test_refused_pods_in_the_pod_list_do_not_affect_others() -> None:
    async with one_node_cluster() as cluster, cluster.running():
        for n in range(6):
            cluster.node.create(pod(f"stray{n}", limits={NUMBER: 1}))
            cluster.bind(pod(f"p{n}", limits={NUMBER: 1}), share(0, 1000 + n, slot=n, fence=n + 1))
        for n in range(6):
            await cluster.node.phase(f"p{n}", "Running")
            await cluster.node.phase(f"stray{n}", "Failed")

            assert cluster.env(f"p{n}")["CUDA_DEVICE_MEMORY_LIMIT_0"] == f"{1000 + n}m"
