"""Behind the webhook: the guides of GPUSharing and Koordinator, and all dialects on one device.

GPUSharing's pods name no scheduler: there, an extender of the default one knows them, and here the
webhook gives them to Leasehold. Koordinator's guide has a card of 23040 MiB, ours 15360.
"""

import json
import re
from collections.abc import Mapping

from shared.dialects import DIALECTS
from shared.model.leases.ledger import counted_use
from tests.support.dialects import guides
from tests.support.dialects.checklist import (
    allocated_setup,
    annotation_of,
    annotations_of,
    labels_of,
    leases,
    uuid,
)
from tests.support.dialects.kai_pods import is_kais_own
from tests.support.stack import NEEDS_KUBECTL, Stack, gpu_pod, running, vgpu

pytestmark = NEEDS_KUBECTL

MIB = 1 << 20
CARD_MIB = 15360
NODE = "node-0"


async def test_gpusharing_1_the_guides_pod_runs_as_it_is_printed(up: Stack) -> None:
    await up.apply(guides.GPUSHARING_POD)
    await up.until("mnist-case", running)
    pod = await up.until(
        "mnist-case", lambda pod: annotations_of(pod).get("tencent.com/gpu-assigned") == "true"
    )
    environment = await up.environment("mnist-case")
    answer = await allocated_setup(up, pod, "nvidia")

    index = int(annotation_of(pod, "tencent.com/predicate-gpu-idx-0"))
    assert annotation_of(pod, "tencent.com/predicate-node") == NODE
    assert re.fullmatch(r"\d{19}", annotation_of(pod, "tencent.com/predicate-time"))
    assert annotation_of(pod, "tencent.com/vcuda-core-limit") == "50", (
        "the automated annotation tag"
    )
    assert environment["NVIDIA_VISIBLE_DEVICES"] == uuid(index)
    assert environment["CUDA_DEVICE_MEMORY_LIMIT_0"] == "3840m"
    assert environment["CUDA_DEVICE_SM_LIMIT"] == "50"
    assert dict(answer.annotations) == {
        "tencent.com/vcuda-core": "50",
        "tencent.com/vcuda-memory": str(15 * 256 * MIB),
        "tencent.com/vcuda-device": f"/dev/nvidia{index}",
    }


async def test_koordinator_26_the_guides_pod_runs_and_sees_its_half_of_the_memory(
    up: Stack,
) -> None:
    await up.apply(guides.KOORDINATOR_POD)
    pod = await up.until("pod-example", running)
    shown = await up.kubectl("get", "pod", "-n", "default", "pod-example", "-o", "yaml")
    environment = await up.environment("pod-example")

    [card] = json.loads(annotation_of(pod, "scheduling.koordinator.sh/device-allocated"))["gpu"]
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
    assert environment["CUDA_DEVICE_MEMORY_LIMIT"] == str(half_mib * MIB)
    assert environment["CUDA_DEVICE_SM_LIMIT"] == "50"
    assert environment["LD_PRELOAD"] == "/usr/local/vgpu/libvgpu.so"
    mounts = {m.container_path: m for m in (await allocated_setup(up, pod, "curlimage")).mounts}
    library = mounts["/usr/local/vgpu/libvgpu.so"]
    assert library.read_only
    assert library.host_path.startswith(str(up.root / "agents" / NODE))


EVERYBODY: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "vgpu": ("volcano", vgpu(memory=4000, cores=20)),
    "gpushare": ("volcano", {"volcano.sh/gpu-memory": 1024}),
    "vcuda": ("", {"tencent.com/vcuda-core": 25, "tencent.com/vcuda-memory": 15}),
    "hami": ("hami-scheduler", {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 2000}),
    "koord": (
        "koord-scheduler",
        {"koordinator.sh/gpu-core": 30, "koordinator.sh/gpu-memory": 3_000_000_000},
    ),
    "kai": ("kai-scheduler", {}),
}
NOTES = {"kai": {"gpu-fraction": "0.1"}}


async def test_pods_of_all_dialects_share_one_device_and_one_ledger_counts_them(
    up: Stack,
) -> None:
    for name, (scheduler, limits) in EVERYBODY.items():
        notes = NOTES.get(name)
        await up.create(gpu_pod(name, limits, schedulerName=scheduler, annotations=notes))
    for name in EVERYBODY:
        await up.until(name, running)
    held = await leases(up)
    devices, _ = counted_use(held.values())
    limits_of = {
        name: int(re.sub(r"m$", "", value)) * (MIB if value.endswith("m") else 1)
        for name in EVERYBODY
        for key, value in dict((await allocated_setup(up, await up.pod(name))).envs).items()
        if key.startswith("CUDA_DEVICE_MEMORY_LIMIT")
    }

    assert {held[name].dialect for name in EVERYBODY} == set(DIALECTS)
    [use] = devices.values()
    booked_mib = {name: sum(s.memory_mib for s in held[name].shares) for name in EVERYBODY}
    assert booked_mib == {
        "vgpu": 4000,
        "gpushare": 1024,
        "vcuda": 15 * 256,
        "hami": 2000,
        "koord": 2862,
        "kai": 1536,
    }
    assert (use.memory_mib, use.cores_percent, use.shares) == (sum(booked_mib.values()), 75, 6)
    assert limits_of == {
        "vgpu": 4000 * MIB,
        "vcuda": 15 * 256 * MIB,
        "hami": 2000 * MIB,
        "koord": 3_000_000_000,
        "kai": 1536 * MIB,
    }
    assert (await up.environment("kai"))["GPU_PORTION"] == "0.10"
    objects = json.loads(await up.kubectl_out("get", "pods,nodes", "-A", "-o", "json"))["items"]
    assert len(objects) > len(EVERYBODY)
    keys = {key for it in objects for key in {**annotations_of(it), **labels_of(it)}}
    assert {key for key in keys if is_kais_own(key)} == set(), "no author wrote one here"
    await up.audit()
