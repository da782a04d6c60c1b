"""Volcano's guides from their first step: the scheduler's ConfigMap, the node's lines, the pod.

Each ConfigMap goes to the API server through kubectl and comes back from there as the watcher's
`--volcano-conf`. The nodes' agents are ours to start: with one share per card the node shows what
the guide of vGPUs prints.
"""

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.dialects import guides
from tests.support.dialects.checklist import (
    agent,
    annotation_of,
    delete_all_pods,
    node_allocatable,
    refused,
    uuid,
)
from tests.support.stack import NEEDS_KUBECTL, Stack, gpu_pod, running, stack, vgpu
from tests.support.waiting import until

pytestmark = NEEDS_KUBECTL

CONF = "volcano-scheduler-configmap"
CARDS = "node-0"
PARTITIONED = "node-1"


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that the watcher reads when it starts."""
    return tmp_path_factory.mktemp("volcano") / "conf.yaml"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def up(conf: Path) -> AsyncIterator[Stack]:
    """Eight cards with one share each, a card in MIG mode; the watcher reads `conf`."""
    conf.write_text(guides.VOLCANO_GPU_SHARING_CONF)
    layout = "8xGTX1080Ti,1xA100-40GB:mig"
    env = {"LEASEHOLD_VOLCANO_CONF": str(conf)}
    async with (
        stack("--nodes", "2", "--gpus", layout, without=(f"agent-{CARDS}",), env=env) as started,
        agent(started, "--device-split-count", "1", node=CARDS),
    ):
        await started.kubectl_out("create", "namespace", "volcano-system")
        yield started


@contextlib.asynccontextmanager
async def obeying(up: Stack, manifest: str, conf: Path) -> AsyncIterator[list[str]]:
    """Apply a ConfigMap, restart the watcher with it; yield the watcher's log lines about it."""
    await up.apply(manifest)
    conf.write_text(await up.kubectl_out("get", "cm", "-n", "volcano-system", CONF, "-o", "yaml"))
    before = announced(up)
    up.kill("watcher")
    await until(lambda: announced(up) != before)
    log = (up.root / "logs" / "watcher.log").read_text()
    yield [line for line in log.splitlines() if str(conf) in line]
    await delete_all_pods(up)


def announced(up: Stack) -> int:
    """The process of the watcher that is ready."""
    return int(json.loads((up.root / "run" / "watcher.json").read_text())["pid"])


async def test_item_50_the_gpu_sharing_guides_configuration_enables_only_gpushare(
    up: Stack, conf: Path
) -> None:
    async with obeying(up, guides.VOLCANO_GPU_SHARING_CONF, conf) as warnings:
        await up.apply(guides.without_webhook(guides.VOLCANO_GPU_POD_1))
        pod = await up.until("gpu-pod1", running)
        other = await refused(up, gpu_pod("other", vgpu(memory=1000)))

    assert annotation_of(pod, "volcano.sh/gpu-index") == "0"
    assert "belongs to volcano-vgpu, which is not enabled here" in other
    assert not warnings


async def test_item_50_the_vgpu_guides_configuration_enables_only_vgpu(
    up: Stack, conf: Path
) -> None:
    await node_allocatable(
        up, CARDS, {"volcano.sh/vgpu-number": 8, "volcano.sh/vgpu-memory": 89424}
    )
    async with obeying(up, guides.VOLCANO_HAMI_CONF, conf) as warnings:
        await up.apply(guides.POD + guides.VOLCANO_HAMI_POD)
        pod = await up.until("hami-pod", running)
        environment = await up.environment("hami-pod")
        other = await refused(up, gpu_pod("other", {"volcano.sh/gpu-memory": 1000}))

    device = annotation_of(pod, "volcano.sh/vgpu-ids-new").partition(",")[0]
    assert annotation_of(pod, "volcano.sh/vgpu-ids-new") == f"{device},NVIDIA,3000,50:"
    assert environment["NVIDIA_VISIBLE_DEVICES"] == device
    assert environment["CUDA_DEVICE_MEMORY_LIMIT_0"] == "3000m"
    assert environment["CUDA_DEVICE_SM_LIMIT"] == "50"
    assert "belongs to volcano-gpushare, which is not enabled here" in other
    assert not warnings


async def test_item_50_the_mig_guides_pod_gets_an_instance_of_5_gb_for_its_3_gb(
    up: Stack, conf: Path
) -> None:
    async with obeying(up, guides.VOLCANO_MIG_CONF, conf) as warnings:
        await up.apply(guides.POD + guides.VOLCANO_MIG_POD)
        pod = await up.until("mig-pod", running)
        environment = await up.environment("mig-pod")
        ps = (await up.leasehold("ps")).out

    whole = uuid(0, PARTITIONED)
    assert pod["spec"]["nodeName"] == PARTITIONED
    assert annotation_of(pod, "volcano.sh/vgpu-ids-new") == f"{whole}[group1-0],NVIDIA,3000,0:"
    assert environment["NVIDIA_VISIBLE_DEVICES"].startswith("MIG-")
    assert not any(name.startswith("CUDA_DEVICE_") for name in environment)
    assert "1g.5gb" in ps
    assert not warnings, "the guide's spelling of KnowGeometries is no fault"
