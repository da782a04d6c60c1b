"""The guides of GPUSharing and Koordinator with their own manifests, which need an admission.

GPUSharing's pods name no scheduler: there, an extender of the default one knows them, and here the
webhook gives them to Leasehold. Koordinator's guide has a card of 23040 MiB, ours 23028.
"""

import json
import re
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support import guides
from tests.support.checklist import cleared, node_shows, note, notes_of, told, uuid
from tests.support.stack import KUBECTL, Stack, running, stack

pytestmark = [
    pytest.mark.kubectl,
    pytest.mark.skipif(KUBECTL is None, reason="no kubectl on PATH: the guides' commands need one"),
    pytest.mark.asyncio(loop_scope="module"),
]

MIB = 1 << 20
CARD_MIB = 23028
NODE = "node-0"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole() -> AsyncIterator[Stack]:
    """One node with two A10, and the webhook."""
    async with stack("--nodes", "1", "--gpus", "2xA10", webhook=True) as started:
        await node_shows(started, NODE, {"koordinator.sh/gpu.shared": 200})
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def up(whole: Stack) -> AsyncIterator[Stack]:
    """With no pod left over."""
    yield whole
    await cleared(whole)


async def test_gpusharing_1_the_guides_pod_runs_as_it_is_printed(up: Stack) -> None:
    done = await up.kubectl("apply", "-f", "-", stdin=guides.GPUSHARING_POD)
    assert done.code == 0, done.err
    await up.until("mnist-case", running)
    pod = await up.until(
        "mnist-case", lambda found: notes_of(found).get("tencent.com/gpu-assigned") == "true"
    )
    environment = (await up.exec("mnist-case", "env")).out.splitlines()
    answer = await told(up, pod, "nvidia")

    index = int(note(pod, "tencent.com/predicate-gpu-idx-0"))
    assert note(pod, "tencent.com/predicate-node") == NODE
    assert re.fullmatch(r"\d{19}", note(pod, "tencent.com/predicate-time"))
    assert note(pod, "tencent.com/vcuda-core-limit") == "50", "the automated annotation tag"
    assert f"NVIDIA_VISIBLE_DEVICES={uuid(index)}" in environment
    assert "CUDA_DEVICE_MEMORY_LIMIT_0=3840m" in environment
    assert "CUDA_DEVICE_SM_LIMIT=50" in environment
    assert dict(answer.annotations) == {
        "tencent.com/vcuda-core": "50",
        "tencent.com/vcuda-memory": str(15 * 256 * MIB),
        "tencent.com/vcuda-device": f"/dev/nvidia{index}",
    }


async def test_gpusharing_2_the_guides_malformed_requests_are_denied(up: Stack) -> None:
    wrong = guides.GPUSHARING_POD.replace("vcuda-core: 50 ", "vcuda-core: 150")

    done = await up.kubectl("apply", "-f", "-", stdin=wrong)

    assert done.code != 0
    assert "150 must be 1..99 or a multiple of 100" in done.err


async def test_gpusharing_the_node_shows_gpu_managers_resources(up: Stack) -> None:
    blocks = 2 * CARD_MIB // 256

    await node_shows(up, NODE, {"tencent.com/vcuda-core": 200, "tencent.com/vcuda-memory": blocks})


async def test_koordinator_26_the_guides_pod_runs_and_sees_its_half_of_the_memory(
    up: Stack,
) -> None:
    done = await up.kubectl("apply", "-f", "-", stdin=guides.KOORDINATOR_POD)
    assert done.code == 0, done.err
    pod = await up.until("pod-example", running)
    shown = await up.kubectl("get", "pod", "-n", "default", "pod-example", "-o", "yaml")
    environment = (await up.exec("pod-example", "env")).out.splitlines()

    [card] = json.loads(note(pod, "scheduling.koordinator.sh/device-allocated"))["gpu"]
    half_mib = CARD_MIB // 2
    assert card == {
        "minor": card["minor"],
        "resources": {
            "koordinator.sh/gpu-core": "50",
            "koordinator.sh/gpu-memory": f"{half_mib}Mi",
            "koordinator.sh/gpu-memory-ratio": "50",
        },
        "id": uuid(card["minor"]),
    }
    assert "scheduling.koordinator.sh/device-allocated: " in shown.out
    assert "koordinator.sh/gpu-isolation-provider: hami-core" in shown.out
    assert f"CUDA_DEVICE_MEMORY_LIMIT={half_mib * MIB}" in environment
    assert "CUDA_DEVICE_SM_LIMIT=50" in environment
    assert "LD_PRELOAD=/usr/local/vgpu/libvgpu.so" in environment


async def test_koordinator_26_the_library_is_there_without_the_guides_daemon_set(up: Stack) -> None:
    await up.kubectl("apply", "-f", "-", stdin=guides.KOORDINATOR_POD)
    pod = await up.until("pod-example", running)

    answer = await told(up, pod, "curlimage")

    mounted = {mount.container_path: mount for mount in answer.mounts}
    library = mounted["/usr/local/vgpu/libvgpu.so"]
    assert library.read_only
    assert library.host_path.startswith(str(up.root / "agents" / NODE))
