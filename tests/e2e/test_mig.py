"""Devices in MIG mode from the pod's limits to its instance, on one stack with three nodes."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio

from shared.model.device import DeviceMode
from shared.model.names import NodeName
from simcluster.node_agent.gpus import uuid_of
from tests.support.stack import Stack, gpu_pod, running, stack, vgpu

IDS = "volcano.sh/vgpu-ids-new"
MODE = "volcano.sh/vgpu-mode"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def whole() -> AsyncIterator[Stack]:
    async with stack("--gpus", "1xA100-40GB:mig,1xA100-80GB:mig+1xT4") as one:
        yield one


async def run(
    up: Stack, name: str, memory: int, *, node: str = "node-0", mode: DeviceMode | None = None
) -> dict[str, Any]:
    """Run a pod on a node; return it with the variables of its container under `env`."""
    wanted = {MODE: str(mode)} if mode is not None else {}
    spec = {"nodeSelector": {"kubernetes.io/hostname": node}}
    await up.create(gpu_pod(name, vgpu(memory=memory), annotations=wanted, **spec))
    return await up.until(name, running) | {"env": await up.environment(name)}


async def devices(up: Stack) -> dict[str, list[dict[str, Any]]]:
    nodes = json.loads((await up.leasehold("gpus", "--json")).out)["nodes"]
    return {node["node"]: node["devices"] for node in nodes}


async def test_item_45_pods_get_instances_by_their_memory(up: Stack) -> None:
    first = await run(up, "small", 3000)
    uuid = uuid_of(NodeName("node-0"), 0)
    ps = (await up.leasehold("ps")).out
    (device,) = (await devices(up))["node-0"]

    assert first["metadata"]["annotations"][IDS] == f"{uuid}[group1-0],NVIDIA,3000,0:"
    assert first["env"]["NVIDIA_VISIBLE_DEVICES"].startswith("MIG-")
    assert not [name for name in first["env"] if name.startswith("CUDA_")]
    assert "1g.5gb" in ps
    assert (device["mode"], device["layout"], device["used_memory_mib"]) == ("mig", "group1", 5120)


async def test_a_strict_pod_gets_an_instance_where_a_share_would_be_first(up: Stack) -> None:
    strict = {"leasehold.dev/isolation": "strict"}
    spec = {"nodeSelector": {"kubernetes.io/hostname": "node-1"}}
    await up.create(gpu_pod("usual", vgpu(memory=3000), **spec))
    await up.create(gpu_pod("strict", vgpu(memory=3000), annotations=strict, **spec))
    usual, pod = await up.until("usual", running), await up.until("strict", running)
    await up.create(gpu_pod("part", {"volcano.sh/gpu-memory": 1024}, annotations=strict))
    part = await up.until(
        "part", lambda p: [c for c in p["status"].get("conditions", []) if c.get("message")]
    )
    explained = (await up.leasehold("explain", "part")).out

    assert "[" not in usual["metadata"]["annotations"][IDS]
    assert "[" in pod["metadata"]["annotations"][IDS]
    assert "isolation is strict" in part["status"]["conditions"][0]["message"]
    assert "request whole GPUs" in explained


async def test_a_node_with_both_modes_serves_both(up: Stack) -> None:
    instance = await run(up, "instance", 9000, node="node-1", mode=DeviceMode.MIG)
    share = await run(up, "share", 9000, node="node-1", mode=DeviceMode.HAMI_CORE)

    assert instance["env"]["NVIDIA_VISIBLE_DEVICES"].startswith("MIG-")
    assert share["env"]["CUDA_DEVICE_MEMORY_LIMIT_0"] == "9000m"
    assert [each["mode"] for each in (await devices(up))["node-1"]] == ["mig", "hami-core"]
