"""Pods in the dialects of gpu-manager, HAMi and NVIDIA, alone and together on one device."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
import pytest_asyncio

from shared.model.device import DeviceUse
from shared.model.ledger import counted_use
from shared.model.names import DeviceUuid
from tests.support.dialects.checklist import (
    NODE,
    allocated_setup,
    annotate,
    annotation_of,
    annotations_of,
    asking,
    bound,
    container,
    delete_all_pods,
    leases,
    node_allocatable,
    on,
    refused,
    runs,
    uuid,
)
from tests.support.stack import KUBECTL, Stack, running, stack, vgpu

pytestmark = pytest.mark.asyncio(loop_scope="module")

CARD_MIB = 15360
CORE, MEMORY = "tencent.com/vcuda-core", "tencent.com/vcuda-memory"
INDEX = "tencent.com/predicate-gpu-idx-"
GPU = "nvidia.com/gpu"
TO_ALLOCATE = "hami.io/vgpu-devices-to-allocate"
ALLOCATED = "hami.io/vgpu-devices-allocated"

GPUSHARING = """
apiVersion: v1
kind: Pod
metadata:
  name: mnist-case
spec:
  schedulerName: leasehold
  containers:
  - image: localhost:5000/usecase/mnist:latest
    name: nvidia
    command: ["sleep", "100000"]
    resources:
      limits:
        tencent.com/vcuda-core: 50      # 50% of a GPU
        tencent.com/vcuda-memory: 15    # 15 * 256MB of VRAM
"""
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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cards() -> AsyncIterator[Stack]:
    """One node with three T4."""
    async with stack("--nodes", "1", "--gpus", "3xT4") as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def up(cards: Stack) -> AsyncIterator[Stack]:
    """With no pod left over."""
    yield cards
    await delete_all_pods(cards)


def vcuda(core: int, memory: int = 0) -> dict[str, int]:
    return {CORE: core, MEMORY: memory} if memory else {CORE: core}


def hami(**amounts: int) -> dict[str, int]:
    return {f"nvidia.com/{key.replace('_', '-')}": amount for key, amount in amounts.items()}


def chosen(*indices: int) -> dict[str, str]:
    """Return the annotation that keeps a HAMi pod on some cards."""
    return {"nvidia.com/use-gpuuuid": ",".join(uuid(index) for index in indices)}


async def environment(up: Stack, name: str) -> list[str]:
    done = await up.exec(name, "env")
    assert done.code == 0, done.err
    return done.out.splitlines()


async def noted(up: Stack, name: str, key: str, text: str) -> dict[str, Any]:
    """Wait until the agent has written an annotation."""
    return await up.until(name, lambda pod: annotations_of(pod).get(key) == text)


async def use_of(up: Stack, index: int) -> DeviceUse:
    devices, _ = counted_use((await leases(up)).values())
    return devices.get(DeviceUuid(uuid(index)), DeviceUse())


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


async def test_the_node_shows_every_dialects_amounts_of_its_cards(up: Stack) -> None:
    node = await node_allocatable(
        up,
        NODE,
        {
            CORE: 300,
            MEMORY: 3 * CARD_MIB // 256,
            GPU: 30,
            "nvidia.com/gpumem": 3 * CARD_MIB,
            "nvidia.com/gpucores": 300,
            "volcano.sh/vgpu-number": 30,
        },
    )

    register = json.loads(annotation_of(node, "hami.io/node-nvidia-register"))
    assert [(r["id"], r["count"], r["devmem"], r["health"]) for r in register] == [
        (uuid(index), 10, CARD_MIB, True) for index in range(3)
    ]


@pytest.mark.kubectl
@pytest.mark.skipif(KUBECTL is None, reason="no kubectl on PATH")
async def test_gpusharing_1_the_guides_pod_gets_half_a_card_through_kubectl(up: Stack) -> None:
    done = await up.kubectl("apply", "-f", "-", stdin=GPUSHARING)
    assert done.code == 0, done.err
    await up.until("mnist-case", running)
    pod = await noted(up, "mnist-case", "tencent.com/gpu-assigned", "true")
    lines = await environment(up, "mnist-case")

    index = int(annotation_of(pod, f"{INDEX}0"))
    assert re.fullmatch(r"\d{19}", annotation_of(pod, "tencent.com/predicate-time"))
    assert annotation_of(pod, "tencent.com/predicate-node") == NODE
    assert f"NVIDIA_VISIBLE_DEVICES={uuid(index)}" in lines
    assert "CUDA_DEVICE_MEMORY_LIMIT_0=3840m" in lines
    assert "CUDA_DEVICE_SM_LIMIT=50" in lines
    assert Counter(text.rpartition("-")[0] for text in ids_given(up, pod, CORE)) == {
        uuid(index): 50
    }


@pytest.mark.kubectl
@pytest.mark.skipif(KUBECTL is None, reason="no kubectl on PATH")
async def test_hami_the_published_example_gets_its_limits_through_kubectl(up: Stack) -> None:
    done = await up.kubectl("apply", "-f", "-", stdin=HAMI)
    assert done.code == 0, done.err
    await up.until("gpu-pod", running)
    pod = await noted(up, "gpu-pod", "hami.io/bind-phase", "success")
    lines = await environment(up, "gpu-pod")

    elements = re.fullmatch(r"((?:[^,;:]+,NVIDIA,3000,30:){2});", annotation_of(pod, ALLOCATED))
    assert elements
    devices = re.findall(r"(GPU-[^,]+),", elements[1])
    assert f"NVIDIA_VISIBLE_DEVICES={','.join(devices)}" in lines
    assert {"CUDA_DEVICE_MEMORY_LIMIT_0=3000m", "CUDA_DEVICE_MEMORY_LIMIT_1=3000m"} <= set(lines)
    assert {"CUDA_DEVICE_SM_LIMIT=30", "CUDA_TASK_PRIORITY=0"} <= set(lines)
    assert annotation_of(pod, TO_ALLOCATE) == ";"
    assert annotation_of(pod, "hami.io/vgpu-node") == NODE


async def test_plain_nvidia_pods_get_whole_cards_and_only_the_visible_devices(up: Stack) -> None:
    pod = await runs(up, asking("plain", {GPU: 2}, schedulerName="leasehold"))
    given = await allocated_setup(up, pod)

    devices = re.findall(r"(GPU-[^,]+),NVIDIA,15360,100:", annotation_of(pod, ALLOCATED))
    assert dict(given.envs) == {"NVIDIA_VISIBLE_DEVICES": ",".join(devices)}
    assert len(devices) == 2
    assert not given.mounts


async def test_three_dialects_share_one_device_and_one_ledger_counts_them(up: Stack) -> None:
    await runs(up, asking("volcano", vgpu(memory=4000, cores=30), on(1)))
    tencent = await runs(up, asking("tencent", vcuda(50, 15)))
    await runs(
        up,
        asking(
            "hami", hami(gpu=1, gpumem=2000, gpucores=20), chosen(1), schedulerName="hami-scheduler"
        ),
    )
    held = await leases(up)
    use = await use_of(up, 1)

    assert annotation_of(tencent, f"{INDEX}0") == "1", "the fullest card that fits"
    assert {lease.dialect for lease in held.values()} == {"volcano-vgpu", "tencent", "nvidia"}
    assert {share.device for lease in held.values() for share in lease.shares} == {uuid(1)}
    assert (use.memory_mib, use.cores_percent, use.shares) == (4000 + 3840 + 2000, 100, 3)
    await refused(up, asking("fourth", hami(gpu=1, gpumem=100), chosen(1)))
    await up.audit()


async def test_a_whole_device_is_never_shared_and_a_shared_device_is_never_given_whole(
    up: Stack,
) -> None:
    await bound(up, asking("whole", hami(gpu=1), chosen(0)))
    for name, limits in (
        ("share", hami(gpu=1, gpumem=1)),
        ("cores", hami(gpu=1, gpucores=100, gpumem=1)),
    ):
        await refused(up, asking(name, limits, chosen(0)))
    await refused(up, asking("volcano", vgpu(memory=1), on(0)))
    shared = await bound(up, asking("shared", vcuda(1, 1)))
    late = await refused(up, asking("three", vcuda(300)))

    assert annotation_of(shared, f"{INDEX}0") != "0"
    assert late.startswith("0/1 nodes are available")


async def test_gpusharing_4_200_cores_are_two_whole_cards_also_in_the_kubelet(up: Stack) -> None:
    pod = await runs(up, asking("two", vcuda(200, 4)))
    first, second = sorted(int(index) for index in annotation_of(pod, f"{INDEX}0").split(","))
    given = await allocated_setup(up, pod)

    assert dict(given.envs) == {"NVIDIA_VISIBLE_DEVICES": f"{uuid(first)},{uuid(second)}"}
    assert (
        given.annotations["tencent.com/vcuda-device"] == f"/dev/nvidia{first},/dev/nvidia{second}"
    )
    assert Counter(text.rpartition("-")[0] for text in ids_given(up, pod, CORE)) == {
        uuid(first): 100,
        uuid(second): 100,
    }
    assert (await use_of(up, first)).memory_mib == CARD_MIB


async def test_memory_requested_beside_whole_cards_is_limited_by_the_nodes_allocatable(
    up: Stack,
) -> None:
    blocks = 3 * CARD_MIB // 256
    await runs(up, asking("large", vcuda(100, blocks - 20)))

    reason = await refused(up, asking("further", vcuda(100, 21)))
    await runs(up, asking("beside", vcuda(100, 20)))

    assert f"Insufficient {MEMORY}" in reason


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ({CORE: 150}, "tencent.com/vcuda-core=150 must be 1..99 or a multiple of 100"),
        ({CORE: 50}, "tencent.com/vcuda-core=50 is less than a GPU and needs"),
        ({MEMORY: 4}, "tencent.com/vcuda-memory=4 needs tencent.com/vcuda-core"),
        ({"nvidia.com/gpumem": 300}, "nvidia.com/gpumem needs nvidia.com/gpu"),
        ({CORE: 100, GPU: 1}, "the pod mixes tencent and nvidia"),
    ],
    ids=["gpusharing 2", "gpusharing 3", "gpusharing 3 again", "no count", "mixed"],
)
async def test_gpusharing_2_and_3_requests_that_cannot_be_granted_are_explained(
    up: Stack, limits: dict[str, int], text: str
) -> None:
    reason = await refused(up, asking("wrong", limits))

    assert text in reason
    assert "cuda" in reason, "names the container"


async def test_gpusharing_7_annotations_index_containers_by_their_position_in_the_pod(
    up: Stack,
) -> None:
    beside: dict[str, Any] = {
        "initContainers": [container("fetch", command=["true"])],
        "containers": [container("log"), container("main", vcuda(30, 4)), container("end")],
    }
    tencent = await runs(up, asking("tencent", {}, **beside))
    beside["containers"][1] = container("main", hami(gpu=1, gpumem=1000))
    hamis = await runs(up, asking("hamis", {}, **beside))
    hamis = await noted(up, "hamis", TO_ALLOCATE, ";;;;")

    places = {key for key in annotations_of(tencent) if key.startswith(INDEX)}
    assert places == {f"{INDEX}1"}
    assert re.fullmatch(r";;GPU-[^,]+,NVIDIA,1000,0:;;", annotation_of(hamis, ALLOCATED))


async def test_gpusharing_6_two_containers_get_slices_of_their_own(up: Stack) -> None:
    two = [container("a", vcuda(30, 4)), container("b", vcuda(20, 8))]
    pod = await runs(up, asking("two", {}, containers=two))

    limits = [
        (await allocated_setup(up, pod, name)).envs["CUDA_DEVICE_MEMORY_LIMIT_0"] for name in "ab"
    ]
    assert limits == ["1024m", "2048m"]
    held = (await leases(up))["two"]
    assert sum(share.cores_percent for share in held.shares) == 50


async def test_hami_a_container_reuses_the_device_of_an_init_container(up: Stack) -> None:
    init = container("warm", hami(gpu=1, gpumem=5000), command=["true"])
    pod = await runs(
        up,
        asking(
            "warmed",
            {},
            chosen(2),
            initContainers=[init],
            containers=[container("main", hami(gpu=1, gpumem=3000))],
        ),
    )
    given = await allocated_setup(up, pod, "main")

    assert annotation_of(pod, ALLOCATED) == f"{uuid(2)},NVIDIA,5000,0:;{uuid(2)},NVIDIA,3000,0:;"
    assert given.envs["CUDA_DEVICE_MEMORY_LIMIT_0"] == "3000m"
    assert (await use_of(up, 2)).memory_mib == 5000


async def test_gpusharing_7_a_container_reuses_the_hundredths_of_an_init_container(
    up: Stack,
) -> None:
    await bound(up, asking("beside", vcuda(60, 4)))
    init = container("warm", vcuda(30, 2), command=["true"])
    main = container("main", vcuda(50, 8))
    pod = await runs(up, asking("warmed", {}, initContainers=[init], containers=[main]))
    held = (await leases(up))["warmed"]
    given = await allocated_setup(up, pod, "main")

    devices = {share.container: share.device for share in held.shares}
    assert devices["warm"] != devices["main"], "30 fit beside 60, and 50 do not"
    assert given.envs["NVIDIA_VISIBLE_DEVICES"] == devices["main"]
    assert given.envs["CUDA_DEVICE_MEMORY_LIMIT_0"] == "2048m"
    assert uuid(int(annotation_of(pod, f"{INDEX}0"))) == devices["main"]


async def test_hami_devices_are_spread_unless_the_pod_sets_another_policy(up: Stack) -> None:
    policy = {"hami.io/gpu-scheduler-policy": "binpack"}
    # When the first one runs, the placer knows that the pods of earlier tests are gone.
    spread = [await runs(up, asking(f"s{n}", hami(gpu=1, gpumem=100))) for n in range(3)]
    packed = [await bound(up, asking(f"b{n}", hami(gpu=1, gpumem=900), policy)) for n in range(3)]
    mutex = await refused(
        up, asking("mutex", hami(gpu=1, gpumem=1), {"hami.io/gpu-scheduler-policy": "mutex"})
    )

    assert len({annotation_of(pod, ALLOCATED) for pod in spread}) == 3
    assert len({annotation_of(pod, ALLOCATED) for pod in packed}) == 1
    assert "0/1 nodes are available" in mutex


async def test_hami_a_cordoned_device_gets_no_new_pods(up: Stack) -> None:
    await annotate(up, NODE, {"hami.io/device-cordon": uuid(1)})
    try:
        await refused(up, asking("closed", vgpu(memory=1), on(1)))
    finally:
        await annotate(up, NODE, {"hami.io/device-cordon": None})
    await up.until("closed", running)


async def test_pods_of_one_hundredth_each_fill_a_card_completely(up: Stack) -> None:
    small = [asking(f"p{n}", vcuda(33, 1)) for n in range(3)]
    await asyncio.gather(*(up.create(pod) for pod in small))
    await up.until_all(3)
    last = await runs(up, asking("last", vcuda(1, 1)))

    indices = {annotation_of(await up.pod(f"p{n}"), f"{INDEX}0") for n in range(3)}
    assert indices == {annotation_of(last, f"{INDEX}0")}
    assert (await use_of(up, int(indices.pop()))).cores_percent == 100
