"""Every pod gets exactly its own share, with one write on the way, however many come at once."""

import asyncio
import base64
import json
from typing import Any

import pytest

from shared.kubelet_api.deviceplugin.api_pb2 import ContainerAllocateResponse
from shared.model.devices.device import MIB
from simcluster.gpu_driver.build import compiler
from tests.support.effort import tries
from tests.support.stack import PODS, Stack, gpu_pod, running, vgpu
from tests.support.waiting import until

CONTEXT_MIB = 256
"""What a program takes of a simulated GPU beside its allocations."""
ROUNDS = tries(10)
"""How often thirty pods are admitted at once on one node."""


async def environments(up: Stack) -> dict[str, dict[str, str]]:
    """Read every pod's variables from its kubelet's own record of the allocations."""
    file = up.root / "nodes" / "node-0" / "device-plugins" / "kubelet_internal_checkpoint"
    names = {pod["metadata"]["uid"]: pod["metadata"]["name"] for pod in await up.pods()}
    variables: dict[str, dict[str, str]] = {}
    for entry in json.loads(file.read_text())["Data"]["PodDeviceEntries"] or []:
        response = ContainerAllocateResponse()
        response.ParseFromString(base64.b64decode(entry["AllocResp"]))
        if entry["PodUID"] in names:
            variables[names[entry["PodUID"]]] = dict(response.envs)
    return variables


async def test_item_39_thirty_pods_at_once_each_get_their_own_limits(up: Stack) -> None:
    for turn in range(ROUNDS):
        sizes = {f"p{turn}-{n}": 1000 + 17 * n + turn for n in range(30)}
        await asyncio.gather(
            *(up.create(gpu_pod(name, vgpu(memory=size))) for name, size in sizes.items())
        )
        await up.until_all(len(sizes))

        variables = await environments(up)
        assert {name: variables[name]["CUDA_DEVICE_MEMORY_LIMIT_0"] for name in sizes} == {
            name: f"{size}m" for name, size in sizes.items()
        }
        await up.clear()
    await up.audit()


async def test_item_31_one_write_binds_a_pod_with_all_six_annotations(up: Stack) -> None:
    seen: list[dict[str, Any]] = []
    query = {"fieldSelector": "metadata.name=once", "resourceVersion": "0"}
    async with up.kube.watch(PODS, query=query, silence_s=20) as stream, asyncio.timeout(20):
        await up.create(gpu_pod("once", vgpu(memory=1000)))
        unread = b""
        while not (seen and seen[-1]["spec"].get("nodeName")):
            *lines, unread = (unread + await anext(stream)).split(b"\n")
            for event in map(json.loads, filter(None, lines)):
                if seen and seen[-1]["spec"].get("nodeName"):
                    break
                seen.append(event["object"])
    writes = json.loads(await up.kube.read("/debug/writes?prefix=pods/default/once"))

    assert len(seen) == 2, "the pod was created, and then bound in a single write"
    notes = seen[1]["metadata"]["annotations"]
    ids = notes["volcano.sh/vgpu-ids-new"]
    assert notes["volcano.sh/vgpu-node"] == "node-0"
    assert notes["volcano.sh/devices-to-allocate"] == ids
    assert notes["volcano.sh/bind-phase"] == "allocating"
    assert len(notes["volcano.sh/vgpu-time"]) == len(notes["volcano.sh/bind-time"]) == 10
    assert writes["pods/default/once"]["create/binding"] == 1


@pytest.mark.skipif(compiler() is None, reason="the driver of simulated GPUs needs a C compiler")
async def test_a_program_gets_the_share_of_its_pod_and_no_more(up: Stack) -> None:
    await up.create(gpu_pod("load", vgpu(memory=3000, cores=50)))
    await up.until("load", running)

    seen = await up.exec("load", "nvidia-smi")
    command = up.exec("load", "gpu-load", "alloc 2g", "alloc 1g", "burn 600s")
    load = asyncio.create_task(command)
    try:
        measured = await until(lambda: usage_of(up, "load"), lambda usage: usage[1] > 0)
        seen_meanwhile = await up.exec("load", "nvidia-smi")
    finally:
        await up.clear()
        done = await load

    assert "0MiB /    3000MiB" in seen.out
    assert measured[0] == 2048 + CONTEXT_MIB
    assert f"{2048 + CONTEXT_MIB}MiB /    3000MiB" in seen_meanwhile.out
    assert done.out.splitlines()[:2] == ["alloc 2g: ok", "alloc 1g: out of memory"]
    assert done.code == 137, "a program ends with its container"


async def usage_of(up: Stack, pod: str) -> tuple[float, float]:
    """Return the memory, in MiB, and the part of the cores that a pod is measured to use."""
    values = await up.values_of(pod)
    memory = values.get("leasehold_container_memory_measured_bytes", 0.0)
    return memory / MIB, values.get("leasehold_container_cores_measured_ratio", 0.0)
