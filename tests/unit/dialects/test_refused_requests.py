"""Requests of every dialect that are refused, with what is wrong."""

from typing import Any

import pytest

from shared.dialects import GPU_RESOURCES
from shared.dialects.dialect import PodManifest, Rules
from shared.dialects.pod_requests import annotated_amounts, parse_pod_request
from shared.dialects.vocabulary import find_misplaced
from shared.model.errors import RequestError
from shared.model.names import Namespace
from tests.support.dialects.builders import (
    Asked,
    each,
    gpushare,
    hami,
    koord,
    noted,
    read,
    vcuda,
    vgpu,
)

GI = 1 << 30
KOORD = {"scheduler": "koord-scheduler"}
LABEL = "koordinator.sh/gpu-isolation-provider"
CARDS = hami(gpu=2)
PART = hami(gpu=1, gpumem=1000)
OLD = {"kubernetes.io/gpu-core": 50, "kubernetes.io/gpu-memory-ratio": 20}
REFUSED: dict[str, tuple[Asked, dict[str, Any], str]] = {
    "item 22 more than all cores": (
        vgpu(number=1, cores=101), {}, "container c: .*vgpu-cores must be 0 to 100",
    ),
    "item 33 memory without a number": (
        vgpu(memory=3000), {}, "container c: .* needs volcano.sh/vgpu-number",
    ),
    "a negative amount": (
        {"nvidia.com/gpu.shared": -1}, {"scheduler": "hami-scheduler"},
        "container c: nvidia.com/gpu.shared must be 0 or more, got -1$",
    ),
    "bytes for MiB": (
        vgpu(number=1, memory=3 * GI), {}, "is a number of MiB, .*: for 3Gi write 3072$",
    ),
    "bytes for MiB of gpushare": (gpushare(memory=GI), {}, "gpu-memory .*: for 1Gi write 1024$"),
    "more than any GPU has": (
        hami(gpu=1, gpumem=2048 * GI), {}, "for 2048Gi write 2097152; no GPU has so much$",
    ),
    "MiB with their unit": (hami(gpu=1, gpumem=3000 << 20), {}, "for 3000Mi write 3000$"),
    "bytes for MiB of hami": (hami(gpu=1, gpumem=8 * GI), {}, "gpumem .*: for 8Gi write 8192$"),
    "bytes for blocks": (
        vcuda(core=30, memory=3 * GI), {},
        "vcuda-memory is a number of blocks of 256 MiB: for 3Gi write 12$",
    ),
    "MiB for bytes": (
        koord(shared=2, memory=1000), KOORD,
        "1000 over 2 is less than 1 MiB each; for as many MiB write 1000Mi$",
    ),
    "no gpus": (vgpu(number=0), {}, "container c: .*of 1 or more"),
    "more than all memory": (
        vgpu(number=1, memory_percentage=101), {}, "container c: .*must be 1 to 100",
    ),
    "two dialects of volcano": (
        (vgpu(number=1), gpushare(memory=5)), {}, "mixes volcano-vgpu and volcano-gpushare",
    ),
    "gpusharing 2 150 cores": (
        vcuda(core=150, memory=4),
        {},
        '^container "c": tencent.com/vcuda-core=150 must be 1..99 or a multiple of 100: write 200',
    ),
    "gpusharing 3 cores alone": (
        vcuda(core=50),
        {},
        'container "c": .*vcuda-core=50 is less than a GPU and needs tencent.com/vcuda-memory',
    ),
    "gpusharing 3 memory alone": (
        vcuda(memory=4),
        {},
        'container "c": .*vcuda-memory=4 needs tencent.com/vcuda-core beside it',
    ),
    "two halves without memory do not add up to a gpu": (
        (vcuda(core=50), vcuda(core=50)), {}, 'container "a"',
    ),
    "a limit that is no number": (
        vcuda(core=30, memory=4),
        noted(limit="half"),
        r"vcuda-core-limit must be a whole number.*'half'",
    ),
    "memory without a gpu": (
        hami(gpumem=3000), {}, "container c: .*gpumem needs nvidia.com/gpu of 1 or more",
    ),
    "cores without a gpu": (
        hami(gpucores=30), {}, "container c: .*gpucores needs nvidia.com/gpu of 1 or more",
    ),
    "percent of no gpu": (
        hami(gpu=0, gpumem_percentage=30), {}, "container c: .*percentage needs nvidia.com/gpu",
    ),
    "priority without a gpu": (
        hami(priority=1), {}, "container c: .*priority needs nvidia.com/gpu",
    ),
    "101 cores": (
        hami(gpu=1, gpucores=101),
        {},
        "container c: .*gpucores must be 0 to 100, got 101",
    ),
    "101 percent": (
        hami(gpu=1, gpumem_percentage=101),
        {},
        "container c: .*gpumem-percentage must be 1 to 100, got 101",
    ),
    "negative memory": (
        hami(gpu=1, gpumem=-1), {}, "container c: .*gpumem must be 0 or more, got -1",
    ),
    "a policy of devices": (
        PART,
        noted(devices="binpak"),
        "gpu-scheduler-policy must be one of binpack, spread, .* got 'binpak'",
    ),
    "a policy of nodes": (
        PART, noted(node="pack"), "must be one of binpack, spread, fragmentation",
    ),
    "a weight of nothing": (
        PART, noted(weights="slots=1"), "must look like slot=1,core=1,memory=3",
    ),
    "a negative weight": (
        PART, noted(weights="slot=-1"), "slot must be a number from 0 to 1000, got '-1'",
    ),
    "a word that is no boolean": (
        PART, noted(numa="yes"), "numa-bind must be true or false, got 'yes'",
    ),
    "a mode": (PART, noted(mode="mps"), "vgpu-mode must be hami-core or mig, got 'mps'"),
    "hamis memory beside koordinators gpus": (
        PART, KOORD, "gpumem belongs to nvidia, and .* nvidia.com/gpu, which belongs to koord",
    ),
    "hamis memory for koordinators scheduler": (
        hami(gpumem=3000),
        KOORD,
        "gpumem has no meaning in pods for the scheduler 'koord-scheduler'",
    ),
    "koordinator 3 one and a half gpus": (
        koord(gpu=150), {}, r"container c: koordinator\.sh/gpu must be .* got 150",
    ),
    **{
        f"koordinator 4 an illegal combination: {text}": (limits, KOORD, f"container c: .*{text}")
        for limits, text in (
            (koord(core=50), "gpu-core 50: memory is missing"),
            (koord(shared=1), "gpu.shared 1: memory is missing"),
            (koord(shared=1, core=50), "gpu.shared 1: memory is missing"),
            (koord(shared=1, memory=GI, ratio=50), "in bytes or as a ratio"),
            (koord(gpu=50, core=50), "core 50: koordinator.sh/gpu .* must be alone"),
            (koord(gpu=100, shared=1), "shared 1: koordinator.sh/gpu .* must be alone"),
            (CARDS | koord(shared=1, ratio=50), "not with both"),
            ({"huawei.com/npu-core": 1} | koord(memory=GI), "NPUs"),
        )
    },
    "koordinator 5 101 over two gpus": (
        koord(shared=2, ratio=101), {}, r"multiple of koordinator\.sh/gpu\.shared 2, got 101",
    ),
    "koordinator 5 300 over two gpus": (
        koord(shared=2, ratio=300), {}, "150 percent of each GPU",
    ),
    "koordinator 9 an old name beside a new one": (
        OLD | koord(core=50), {}, r"repeats koordinator\.sh/gpu-core",
    ),
    "more compute than one gpu has": (
        koord(core=200, ratio=50), {}, "200 percent of each GPU",
    ),
    "the hyphen of some tutorials": (
        {"koordinator.sh/gpu-shared": 1} | koord(core=50, ratio=50),
        {},
        r"the name has a dot: koordinator\.sh/gpu\.shared",
    ),
    "a container that would start without a call of allocate": (
        koord(core=50, ratio=50),
        {},
        r"gpu\.shared is missing.* add koordinator.sh/gpu.shared: 1, or install",
    ),
    "whole gpus without a call of allocate": (
        koord(gpu=200),
        {},
        r"gpu\.shared is missing.* add koordinator.sh/gpu.shared: 2, and replace",
    ),
    "ratio and bytes in one pod": (
        (koord(shared=1, ratio=50), koord(shared=1, memory=GI)),
        {},
        "container a requests memory as a ratio and container b",
    ),
    "names of two vendors in one pod": (
        (koord(shared=1, ratio=50), CARDS), KOORD, "one of the two for all containers",
    ),
    "another provider of isolation": (
        koord(shared=1, ratio=50),
        {"labels": {LABEL: "hami"}},
        "must be HAMi-core, got 'hami'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("asked", "options", "text"), REFUSED.values(), ids=REFUSED)
def test_a_malformed_request_is_refused_with_what_is_wrong(
    asked: Asked, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(RequestError, match=text):
        read(*each(asked), **options)


@pytest.mark.parametrize("name", sorted(GPU_RESOURCES))
def test_a_pod_without_containers_has_its_resources_in_annotations_named(name: str) -> None:
    pod = PodManifest(namespace=Namespace("ml"), containers=(), annotations={name: "1"})

    [word] = find_misplaced(pod)

    assert f"{name} has no effect" in word.text


def test_a_fraction_in_a_pod_without_containers_is_refused() -> None:
    pod = PodManifest(
        namespace=Namespace("ml"),
        containers=(),
        annotations={"gpu-fraction": "0.5"},
        scheduler="kai-scheduler",
    )

    for check in (parse_pod_request, annotated_amounts):
        with pytest.raises(RequestError, match="no container that could have a part of a GPU"):
            check(pod, Rules())
