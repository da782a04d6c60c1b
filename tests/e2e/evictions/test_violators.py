"""A container raises its own limit: the limit is restored and the pod is evicted."""

import json
import struct
from pathlib import Path

from services.node_agent.isolation.region import Region
from services.node_agent.isolation.region_layouts import V1_2
from services.node_agent.isolation.region_reader import read_region
from shared.kubernetes.errors import NotFoundError
from tests.support.stack import PODS, Stack, gpu_pod, running, vgpu
from tests.support.waiting import until

MIB = 1 << 20


def limit_of(region: Path) -> int:
    content = read_region(region)
    assert isinstance(content, Region)
    return content.memory_limits[0]


async def until_deleted(up: Stack, name: str) -> None:
    async def is_deleted() -> bool:
        try:
            await up.kube.read(f"{PODS}/{name}")
        except NotFoundError:
            return True
        return False

    await until(is_deleted)


async def test_a_pod_that_raises_its_own_limit_is_evicted_and_its_neighbour_stays(
    up: Stack,
) -> None:
    for name in ("good", "bad"):
        await up.create(gpu_pod(name, vgpu(memory=2000)))
    pods = {name: await up.until(name, running) for name in ("good", "bad")}
    uid = pods["bad"]["metadata"]["uid"]
    (region,) = up.root.glob(f"agents/*/containers/{uid}_*/*.cache")
    with region.open("r+b") as file:
        file.seek(V1_2.memory_limits)
        file.write(struct.pack("<Q", 16_000 * MIB))
    await until(lambda: limit_of(region) == 2000 * MIB)
    await until_deleted(up, "bad")
    await until(
        lambda: up.leasehold("preemptions"),
        lambda done: "default/bad" in done.out and "violation" in done.out,
    )
    good = json.loads(await up.kube.read(f"{PODS}/good"))

    async def reasons() -> set[str]:
        events = json.loads(await up.kube.read("/api/v1/namespaces/default/events"))["items"]
        return {event["reason"] for event in events if event["involvedObject"]["uid"] == uid}

    await until(reasons, lambda written: written >= {"GpuLimitTampered", "GPUViolationEvict"})
    assert "deletionTimestamp" not in good["metadata"]
