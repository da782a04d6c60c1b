"""GPUs in MIG mode beside shared ones, from the pod's limits to its instance."""

import json
from typing import Any

from shared.model.devices.device import DeviceMode
from tests.support.stack import Stack, gpu_pod, running, vgpu

IDS = "volcano.sh/vgpu-ids-new"
MODE = "volcano.sh/vgpu-mode"


async def test_a_strict_pod_gets_an_instance_where_a_share_would_be_first(up: Stack) -> None:
    strict = {"leasehold.dev/isolation": "strict"}
    await up.create(gpu_pod("usual", vgpu(memory=3000)))
    await up.create(gpu_pod("strict", vgpu(memory=3000), annotations=strict))
    usual = await up.until("usual", running)
    pod = await up.until("strict", running)
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
    async def run(name: str, mode: DeviceMode) -> dict[str, str]:
        await up.create(gpu_pod(name, vgpu(memory=9000), annotations={MODE: str(mode)}))
        await up.until(name, running)
        return await up.environment(name)

    instance = await run("instance", DeviceMode.MIG)
    share = await run("share", DeviceMode.HAMI_CORE)
    [node] = json.loads((await up.leasehold("gpus", "--json")).out)["nodes"]

    assert instance["NVIDIA_VISIBLE_DEVICES"].startswith("MIG-")
    assert not [name for name in instance if name.startswith("CUDA_")]
    assert share["CUDA_DEVICE_MEMORY_LIMIT_0"] == "9000m"
    shown: list[dict[str, Any]] = node["devices"]
    assert [(share["mode"], share["used_memory_mib"] > 9000) for share in shown] == [
        ("hami-core", False),
        ("mig", True),
    ]
