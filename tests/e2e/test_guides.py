"""The user guides' own commands, through a stock kubectl, on the guide's own kind of node."""

import json
import re
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.dialects import guides
from tests.support.stack import NEEDS_KUBECTL, Stack, running, stack
from tests.support.waiting import until

pytestmark = [
    *NEEDS_KUBECTL,
    pytest.mark.asyncio(loop_scope="module"),
]


def gpushare(name: str, memory: int) -> str:
    """The guide's pod under another name, with other memory."""
    return guides.VOLCANO_GPU_POD_1.replace("gpu-pod1", name).replace("1024 #", f"{memory} #")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guide() -> AsyncIterator[Stack]:
    """One node with the guide's eight cards of 11178 MiB; requests may wait for a larger one."""
    env = {"LEASEHOLD_ALLOW_LARGER_REQUESTS": "true"}
    async with stack("--nodes", "1", "--gpus", "8xGTX1080Ti", webhook=True, env=env) as up:
        yield up


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def clean(guide: Stack) -> AsyncIterator[None]:
    yield
    await guide.clear()


async def apply(guide: Stack, manifest: str) -> None:
    done = await guide.kubectl("apply", "-f", "-", stdin=manifest)
    assert done.code == 0, done.err


async def test_item_1_the_node_shows_the_guides_allocatable_lines(guide: Stack) -> None:
    done = await guide.kubectl("get", "node", "node-0", "-oyaml")

    for block in ("allocatable", "capacity"):
        lines = done.out.partition(f"{block}:")[2]
        assert 'volcano.sh/gpu-memory: "89424"' in lines
        assert 'volcano.sh/gpu-number: "8"' in lines
        assert 'volcano.sh/vgpu-memory: "89424"' in lines
        assert 'volcano.sh/vgpu-number: "80"' in lines
        assert 'volcano.sh/vgpu-cores: "800"' in lines


async def test_the_two_gpushare_pods_share_card_0_and_have_the_guides_variables(
    guide: Stack,
) -> None:
    await apply(guide, guides.VOLCANO_GPU_POD_1)
    await apply(guide, guides.VOLCANO_GPU_POD_2)
    for name in ("gpu-pod1", "gpu-pod2"):
        await guide.until(name, running)

    pods = [await guide.pod(name) for name in ("gpu-pod1", "gpu-pod2")]
    shown = await guide.kubectl("get", "pod", "gpu-pod1", "-oyaml")
    environment = await guide.exec("gpu-pod1", "env")

    for pod in pods:
        notes = pod["metadata"]["annotations"]
        assert notes["volcano.sh/gpu-index"] == "0"
        assert re.fullmatch(r"\d{19}", notes["volcano.sh/predicate-time"])
    assert 'volcano.sh/gpu-index: "0"' in shown.out
    assert environment.code == 0, environment.err
    lines = environment.out.splitlines()
    assert "VOLCANO_GPU_MEMORY_TOTAL=11178" in lines
    assert "VOLCANO_GPU_ALLOCATED=1024" in lines
    assert "NVIDIA_VISIBLE_DEVICES=0" in lines


async def test_item_9_an_allocated_pod_is_marked_assigned(guide: Stack) -> None:
    await apply(guide, guides.VOLCANO_GPU_POD_1)

    await guide.until(
        "gpu-pod1",
        lambda pod: pod["metadata"].get("annotations", {}).get("volcano.sh/gpu-assigned") == "true",
    )


async def test_item_4_a_whole_card_gets_an_idle_card_and_a_too_large_request_waits_with_the_reason(
    guide: Stack,
) -> None:
    await apply(guide, gpushare(name="small", memory=1024))
    await guide.until("small", running)
    await apply(guide, gpushare(name="large", memory=11178))
    large = await guide.until("large", running)
    await apply(guide, gpushare(name="huge", memory=20000))
    await guide.until("huge", unscheduled)

    described = await guide.kubectl("describe", "pod", "huge")

    assert large["metadata"]["annotations"]["volcano.sh/gpu-index"] == "1"
    assert "FailedScheduling" in described.out
    assert "at most 11178 MiB" in described.out
    assert "0/1 nodes are available" in described.out


def unscheduled(pod: dict[str, dict[str, list[dict[str, str]]]]) -> bool:
    conditions = pod["status"].get("conditions", [])
    return any(c["type"] == "PodScheduled" and c["status"] == "False" for c in conditions)


async def test_the_vgpu_pod_gets_two_cards_and_its_limits(guide: Stack) -> None:
    await apply(guide, guides.VOLCANO_VGPU_POD)
    await guide.until("gpu-pod1", running)
    pod = await guide.until(
        "gpu-pod1",
        lambda p: p["metadata"]["annotations"]["volcano.sh/bind-phase"] == "success",
    )

    environment = (await guide.exec("gpu-pod1", "env")).out.splitlines()
    described = await guide.kubectl("describe", "pod", "gpu-pod1")

    notes = pod["metadata"]["annotations"]
    devices = re.fullmatch(
        r"(GPU-[^,]+),NVIDIA,3000,50:(GPU-[^,]+),NVIDIA,3000,50:", notes["volcano.sh/vgpu-ids-new"]
    )
    assert devices is not None
    assert notes["volcano.sh/vgpu-node"] == "node-0"
    assert notes["volcano.sh/devices-to-allocate"] == ""
    assert notes["volcano.sh/vgpu-time"] == "18446744073709551615"
    values = dict(line.partition("=")[::2] for line in environment)
    assert sorted(values["NVIDIA_VISIBLE_DEVICES"].split(",")) == sorted(devices.groups())
    assert values["CUDA_DEVICE_MEMORY_LIMIT_0"] == "3000m"
    assert values["CUDA_DEVICE_MEMORY_LIMIT_1"] == "3000m"
    assert values["CUDA_DEVICE_SM_LIMIT"] == "50"
    assert re.search(r"Scheduled.*Successfully assigned default/gpu-pod1 to node-0", described.out)


async def test_deleting_a_pod_frees_its_share_for_a_waiting_pod(guide: Stack) -> None:
    for card in range(8):
        await apply(guide, gpushare(name=f"full-{card}", memory=11178))
    for card in range(8):
        await guide.until(f"full-{card}", running)
    await apply(guide, gpushare(name="waits", memory=5000))
    await guide.until("waits", unscheduled)

    deleted = await guide.kubectl("delete", "pod", "full-3", "--wait")

    assert deleted.code == 0, deleted.err
    waited = await guide.until("waits", running)
    assert waited["metadata"]["annotations"]["volcano.sh/gpu-index"] == "3"


async def test_gpus_ps_explain_and_trace_show_running_and_waiting_pods(guide: Stack) -> None:
    await apply(guide, guides.VOLCANO_VGPU_POD)
    await guide.until("gpu-pod1", running)
    await apply(guide, gpushare(name="huge", memory=20000))
    await guide.until("huge", unscheduled)

    gpus = await guide.leasehold("gpus", "--json")
    leases = await guide.leasehold("ps", "--json")
    runs = await guide.leasehold("explain", "gpu-pod1")
    waits = await guide.leasehold("explain", "huge")
    trace = await until(
        lambda: guide.leasehold("trace", "gpu-pod1"), lambda done: "allocate" in done.out
    )

    assert gpus.code == 0, gpus.err
    assert gpus.out.count('"GPU-') >= 8
    assert "gpu-pod1" in json.dumps(json.loads(leases.out))
    assert "node-0" in runs.out
    assert "20000" in waits.out
    assert "11178" in waits.out
    for step in ("watcher", "placer", "binder", "node-agent"):
        assert step in trace.out
