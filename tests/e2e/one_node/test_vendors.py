"""Pods in the dialects of gpu-manager, HAMi and NVIDIA: what the node shows and containers get."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.dialects.checklist import (
    NODE,
    allocated_setup,
    annotation_of,
    annotations_of,
    asking,
    refused,
    runs,
    uuid,
)
from tests.support.stack import KUBECTL, Stack, gpu_pod, running
from tests.support.waiting import until

CARD_MIB = 15360
CARDS = 4
CORE = "tencent.com/vcuda-core"
MEMORY = "tencent.com/vcuda-memory"
INDEX = "tencent.com/predicate-gpu-idx-"
GPU = "nvidia.com/gpu"
TO_ALLOCATE = "hami.io/vgpu-devices-to-allocate"
ALLOCATED = "hami.io/vgpu-devices-allocated"

HAMI = """
apiVersion: v1
kind: Pod
metadata:
  name: gpu-pod
spec:
  schedulerName: hami-scheduler
  containers:
    - name: ubuntu-container
      image: ubuntu:18.04
      command: ["sleep", "86400"]
      resources:
        limits:
          nvidia.com/gpu: 2 # declare how many physical GPUs the pod needs
          nvidia.com/gpumem: 3000 # identify 3000M GPU memory each physical GPU allocates to the pod
          nvidia.com/gpucores: 30 # identify 30% GPU core each physical GPU allocates to the pod
          nvidia.com/priority: 0
"""


def vcuda(core: int, memory: int = 0) -> dict[str, int]:
    return {CORE: core, MEMORY: memory} if memory else {CORE: core}


async def noted(up: Stack, name: str, key: str, text: str) -> dict[str, Any]:
    """Wait until the agent has written an annotation."""
    return await up.until(name, lambda pod: annotations_of(pod).get(key) == text)


def ids_given(up: Stack, pod: Mapping[str, Any], resource: str) -> list[str]:
    """Return the device IDs that the kubelet gave a pod, from the kubelet's own checkpoint."""
    file = up.root / "nodes" / NODE / "device-plugins" / "kubelet_internal_checkpoint"
    return [
        text
        for entry in json.loads(file.read_text())["Data"]["PodDeviceEntries"]
        if (entry["PodUID"], entry["ResourceName"]) == (pod["metadata"]["uid"], resource)
        for ids in entry["DeviceIDs"].values()
        for text in ids
    ]


@pytest.mark.kubectl
@pytest.mark.skipif(KUBECTL is None, reason="no kubectl on PATH")
async def test_hami_the_published_example_gets_its_limits_through_kubectl(up: Stack) -> None:
    await up.apply(HAMI)
    await up.until("gpu-pod", running)
    pod = await noted(up, "gpu-pod", "hami.io/bind-phase", "success")
    variables = await up.environment("gpu-pod")

    elements = re.fullmatch(r"((?:[^,;:]+,NVIDIA,3000,30:){2});", annotation_of(pod, ALLOCATED))
    assert elements
    devices = re.findall(r"(GPU-[^,]+),", elements[1])
    wanted = {
        "NVIDIA_VISIBLE_DEVICES": ",".join(devices),
        "CUDA_DEVICE_MEMORY_LIMIT_0": "3000m",
        "CUDA_DEVICE_MEMORY_LIMIT_1": "3000m",
        "CUDA_DEVICE_SM_LIMIT": "30",
        "CUDA_TASK_PRIORITY": "0",
    }
    assert variables.items() >= wanted.items()
    assert annotation_of(pod, TO_ALLOCATE) == ";"
    assert annotation_of(pod, "hami.io/vgpu-node") == NODE


async def test_plain_nvidia_pods_get_whole_cards_and_only_the_visible_devices(up: Stack) -> None:
    pod = await runs(up, asking("plain", {GPU: 2}, schedulerName="leasehold"))
    given = await allocated_setup(up, pod)

    devices = re.findall(r"(GPU-[^,]+),NVIDIA,15360,100:", annotation_of(pod, ALLOCATED))
    assert dict(given.envs) == {"NVIDIA_VISIBLE_DEVICES": ",".join(devices)}
    assert len(devices) == 2
    assert not given.mounts


async def test_gpusharing_4_200_cores_are_two_whole_cards_also_in_the_kubelet(up: Stack) -> None:
    pod = await runs(up, asking("two", vcuda(200, 4)))
    first, second = sorted(int(index) for index in annotation_of(pod, f"{INDEX}0").split(","))
    given = await allocated_setup(up, pod)

    assert dict(given.envs) == {"NVIDIA_VISIBLE_DEVICES": f"{uuid(first)},{uuid(second)}"}
    assert (
        given.annotations["tencent.com/vcuda-device"] == f"/dev/nvidia{first},/dev/nvidia{second}"
    )
    assert Counter(text.partition("::")[0] for text in ids_given(up, pod, CORE)) == {
        uuid(first): 100,
        uuid(second): 100,
    }


async def test_memory_requested_beside_whole_cards_is_limited_by_the_nodes_allocatable(
    up: Stack,
) -> None:
    blocks = CARDS * CARD_MIB // 256
    await runs(up, asking("large", vcuda(100, blocks - 20)))

    reason = await refused(up, asking("further", vcuda(100, 21)))
    await runs(up, asking("beside", vcuda(100, 20)))

    assert f"Insufficient {MEMORY}" in reason


async def test_a_misspelt_resource_is_explained_in_an_event_within_seconds(up: Stack) -> None:
    async def message() -> str:
        shown = await up.kubectl_out("get", "events", "-o", "json")
        events = (event for event in json.loads(shown)["items"])
        about = [event for event in events if event["involvedObject"]["name"] == "misspelt"]
        return next((e["message"] for e in about if e["reason"] == "UnknownResource"), "")

    limits = {"nvidia.com/GPU": 1}
    await up.create(gpu_pod("misspelt", limits, schedulerName="default-scheduler"))
    written = await until(message)
    explained = await up.leasehold("explain", "misspelt")

    assert written == "no node of this cluster has nvidia.com/GPU: did you mean nvidia.com/gpu?"
    assert "did you mean nvidia.com/gpu?" in explained.out
