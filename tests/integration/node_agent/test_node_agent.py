"""A node agent beside a simulated kubelet: real unix sockets, real TLS, a real checkpoint file."""

import asyncio
import os

import pytest

from services.node_agent.agent_timing import AgentTiming
from services.node_agent.gpus.simulated.gpus import uuid_of
from shared.model.errors import RequestError
from shared.model.names import NodeName
from tests.support.node_agent.agent import MEMORY, NUMBER, handler_of, share, site
from tests.support.simcluster.kubelet import NODE, container, pod
from tests.support.waiting import until

REPEATS = int(os.environ.get("LEASEHOLD_TEST_REPEATS", "2"))


async def test_a_pod_gets_the_limits_and_mounts_of_its_lease() -> None:
    async with site() as at, at.running():
        lease = at.bind(pod("one", limits={NUMBER: 1}), share(1, 3000, cores_percent=50, slot=4))
        await at.node.phase("one", "Running")
        env = at.env("one")
        held = await at.node.allocated_devices()
        mounts = at.node.container("one").mounts
        told = await until(lambda: at.activated)

    assert env["NVIDIA_VISIBLE_DEVICES"] == uuid_of(NodeName(NODE), 1)
    assert env["CUDA_DEVICE_MEMORY_LIMIT_0"] == "3000m"
    assert env["CUDA_DEVICE_SM_LIMIT"] == "50"
    assert held["one", "main"] == {f"{uuid_of(NodeName(NODE), 1)}-4"}
    assert "/usr/local/vgpu/libvgpu.so" in str(mounts)
    assert told[0].allocation.pod == lease.pod


async def test_a_pod_without_a_lease_is_refused_at_once_and_told_why() -> None:
    async with site() as at, at.running():
        began = asyncio.get_running_loop().time()
        at.node.create(pod("stray", limits={NUMBER: 1}))
        await at.node.phase("stray", "Failed")
        took_s = asyncio.get_running_loop().time() - began
        text = at.message("stray")
        refused = await until(lambda: at.refused)

    assert NUMBER in text
    assert "node-0" in text
    assert "holds no lease" in text
    assert refused[0].name == "stray"
    assert took_s < 1.0


async def test_a_pod_is_refused_with_a_sentence_when_nobody_can_say_whether_it_has_a_lease() -> (
    None
):
    async with site(timing=AgentTiming(lease_wait_s=0.5)) as at, at.running():
        at.ledger.silent = True
        at.node.create(pod("stray", limits={NUMBER: 1}))
        await at.node.phase("stray", "Failed")
        text = at.message("stray")

    assert "no reply within 0.5 s on whether pod default/stray" in text


async def test_a_lease_that_no_news_told_of_is_asked_for() -> None:
    async with site() as at, at.running():
        at.bind(pod("one", limits={NUMBER: 1}), share(0, 2000), told=False)
        await at.node.phase("one", "Running")

        assert at.env("one")["CUDA_DEVICE_MEMORY_LIMIT_0"] == "2000m"


async def test_24_leases_already_told_are_honoured_while_nobody_answers() -> None:
    async with site() as at, at.running():
        at.ledger.silent = True
        at.bind(pod("one", limits={NUMBER: 1}), share(0, 2000))
        await at.node.phase("one", "Running")


async def test_32_a_pod_that_sets_a_reserved_variable_is_refused_by_its_name() -> None:
    own = container("main", limits={NUMBER: 1}, env=[{"name": "LD_PRELOAD", "value": "/x.so"}])
    async with site() as at, at.running():
        at.bind(pod("one", containers=[own]), share(0, 2000))
        await at.node.phase("one", "Failed")
        text = at.message("one")
        refused = await until(lambda: at.refused)
        await until(lambda: at.annotation("one", "volcano.sh/bind-phase") == "failed")

    assert "container main of pod default/one sets LD_PRELOAD" in text
    assert "LD_PRELOAD" in refused[0].reason


async def test_37_annotations_follow_each_container_that_was_answered() -> None:
    both = [container("a", limits={NUMBER: 1}), container("b", limits={NUMBER: 1})]
    async with site() as at, at.running():
        at.bind(
            pod("one", containers=both),
            share(0, 1000, container="a", slot=0),
            share(1, 2000, container="b", slot=0),
        )
        await at.node.phase("one", "Running")
        await until(lambda: at.annotation("one", "volcano.sh/bind-phase") == "success")

        assert at.annotation("one", "volcano.sh/vgpu-time") == str(2**64 - 1)
        assert "GPU" not in at.annotation("one", "volcano.sh/devices-to-allocate")
        assert at.env("one", "a")["CUDA_DEVICE_MEMORY_LIMIT_0"] == "1000m"
        assert at.env("one", "b")["CUDA_DEVICE_MEMORY_LIMIT_0"] == "2000m"


async def test_03_a_gpushare_pod_gets_its_three_variables_and_its_mark() -> None:
    async with site() as at, at.running():
        lease = share(1, 1024, slotted=False, slot=None, cores_percent=0)
        at.bind(pod("one", limits={MEMORY: 1024}), lease, dialect="volcano-gpushare")
        await at.node.phase("one", "Running")
        env = at.env("one")
        await until(lambda: at.annotation("one", "volcano.sh/gpu-assigned") == "true")
        held = await at.node.allocated_devices()
        told = await until(lambda: at.activated)

    assert env["NVIDIA_VISIBLE_DEVICES"] == "1"
    assert env["VOLCANO_GPU_ALLOCATED"] == "1024"
    assert env["VOLCANO_GPU_MEMORY_TOTAL"] == "15360"
    assert len(held["one", "main"]) == 1024
    assert {one[:2] for one in held["one", "main"]} == {"1-"}
    assert len(told[0].allocation.device_ids) == 1, "a run of IDs is told as a run"


async def test_an_init_containers_devices_are_handed_on_to_the_pods_container() -> None:
    init = container("first", limits={MEMORY: 500})
    async with site() as at, at.running():
        lease = {"slotted": False, "slot": None, "cores_percent": 0}
        at.bind(
            pod("one", limits={MEMORY: 500}, initContainers=[init]),
            share(0, 500, container="first", init=True, **lease),
            share(0, 500, **lease),
            dialect="volcano-gpushare",
        )
        await at.node.phase("one", "Running")
        told = await until(lambda: len(at.activated) == 2 and at.activated)

    assert [event.allocation.container for event in told] == ["first", "main"]
    assert told[0].allocation.device_ids == told[1].allocation.device_ids


async def test_39_thirty_pods_at_once_each_get_their_own_limits() -> None:
    for _ in range(REPEATS):
        async with site("4xA100-80GB") as at, at.running():
            for n in range(30):
                at.bind(
                    pod(f"p{n}", limits={NUMBER: 1}),
                    share(n % 4, 1000 + n, slot=n // 4, fence=n // 4 + 1),
                    told=n % 2 == 0,
                )
            for n in range(30):
                await at.node.phase(f"p{n}", "Running")
            held = await at.node.allocated_devices()

            for n in range(30):
                assert at.env(f"p{n}")["CUDA_DEVICE_MEMORY_LIMIT_0"] == f"{1000 + n}m"
                assert held[f"p{n}", "main"] == {f"{uuid_of(NodeName(NODE), n % 4)}-{n // 4}"}
            assert not at.refused


async def test_22_a_refusal_takes_less_than_a_tenth_of_a_second() -> None:
    async with site() as at, at.running() as agent:
        loop = asyncio.get_running_loop()
        took: list[float] = []
        for _ in range(3):
            began = loop.time()
            with pytest.raises(
                RequestError, match="no pod in the kubelet's list waits for these devices"
            ):
                await handler_of(agent).allocate(NUMBER, [f"{uuid_of(NodeName(NODE), 0)}-0"])
            took.append(loop.time() - began)

    assert min(took) < 0.1


async def test_a_start_is_refused_if_the_devices_are_with_somebody_else() -> None:
    async with site() as at, at.running() as agent:
        at.bind(pod("one", limits={NUMBER: 1}), share(0, 1000))
        await at.node.phase("one", "Running")
        ids = list((await at.node.allocated_devices())["one", "main"])
        await handler_of(agent).pre_start_container(NUMBER, ids)
        free = [f"{uuid_of(NodeName(NODE), 1)}-7"]

        with pytest.raises(
            RequestError, match="with no container, and they were given to no container"
        ):
            await handler_of(agent).pre_start_container(NUMBER, free)


async def test_refused_pods_that_the_kubelet_still_lists_do_not_confuse_it_about_others() -> None:
    async with site() as at, at.running():
        for n in range(6):
            at.node.create(pod(f"stray{n}", limits={NUMBER: 1}))
            at.bind(pod(f"p{n}", limits={NUMBER: 1}), share(0, 1000 + n, slot=n, fence=n + 1))
        for n in range(6):
            await at.node.phase(f"p{n}", "Running")
            await at.node.phase(f"stray{n}", "Failed")

            assert at.env(f"p{n}")["CUDA_DEVICE_MEMORY_LIMIT_0"] == f"{1000 + n}m"


async def test_a_fence_older_than_one_honoured_for_the_slot_is_refused() -> None:
    async with site() as at, at.running():
        at.bind(pod("one", limits={NUMBER: 1}), share(0, 1000, slot=3, fence=5))
        await at.node.phase("one", "Running")
        at.bind(pod("old", limits={NUMBER: 1}), share(0, 1000, slot=3, fence=4))
        await at.node.phase("old", "Failed")

        assert "fence 4" in at.message("old")
