"""A node agent beside a simulated kubelet: real unix sockets, real TLS, a real checkpoint file."""

import asyncio

from services.node_agent.simulated_gpus import uuid_of
from shared.model.names import NodeName
from tests.support.kubelet import NODE, container, eventually, pod
from tests.support.node_agent import NUMBER, Site, share, site


async def test_registers_its_resources_and_shows_the_node_its_figures() -> None:
    async with site("2xT4") as at, at.running():
        await at.node.allocatable(NUMBER, 20)
        await at.node.allocatable("volcano.sh/vgpu-memory", 30720)
        await at.node.allocatable("volcano.sh/vgpu-cores", 200)
        await at.node.allocatable("volcano.sh/gpu-memory", 30720)
        await at.node.allocatable("volcano.sh/gpu-number", 2)
        report = (await eventually(lambda: at.reported))[0]

    assert [device.index for device in report.devices] == [0, 1]
    assert set(report.served) == {NUMBER, "volcano.sh/gpu-memory"}


async def test_a_pod_gets_the_limits_and_mounts_of_its_lease() -> None:
    async with site() as at, at.running():
        lease = at.bind(pod("one", limits={NUMBER: 1}), share(1, 3000, cores_percent=50, slot=4))
        await at.node.phase("one", "Running")
        env = at.env("one")
        held = await at.node.held()
        mounts = at.node.container("one").mounts
        told = await eventually(lambda: at.activated)

    assert env["NVIDIA_VISIBLE_DEVICES"] == uuid_of(NodeName(NODE), 1)
    assert env["CUDA_DEVICE_MEMORY_LIMIT_0"] == "3000m"
    assert env["CUDA_DEVICE_SM_LIMIT"] == "50"
    assert held["one", "main"] == {f"{uuid_of(NodeName(NODE), 1)}-4"}
    assert "/usr/local/vgpu/libvgpu.so" in str(mounts)
    assert told[0].activation.pod == lease.pod


async def test_a_pod_without_a_lease_is_refused_at_once_and_told_why() -> None:
    async with site() as at, at.running():
        began = asyncio.get_running_loop().time()
        at.node.create(pod("stray", limits={NUMBER: 1}))
        await at.node.phase("stray", "Failed")
        took_s = asyncio.get_running_loop().time() - began
        text = at.message("stray")
        refused = await eventually(lambda: at.refused)

    assert NUMBER in text
    assert "node-0" in text
    assert "holds no lease" in text
    assert refused[0].name == "stray"
    assert took_s < 1.0
