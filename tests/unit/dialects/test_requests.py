"""Requests of every dialect: what the words of a pod mean, and which are refused."""

from collections.abc import Mapping
from functools import reduce
from typing import Any

import pytest

from shared.dialects.dialect import Rules
from shared.dialects.koordinator.dialect import DIALECT as KOORDINATOR
from shared.dialects.koordinator.requests import parse_part, reads_nvidia_gpus
from shared.dialects.pod_requests import amount_changes
from shared.model.devices.device import (
    DeviceUse,
    device_refusal,
    required_cores_percent,
    required_memory_mib,
)
from shared.model.requests.request import DeviceOrder, NodeOrder, SharingPolicy, TopologyScope
from tests.support.dialects.builders import (
    Asked,
    container_with,
    device,
    each,
    gpushare,
    hami,
    koord,
    koordinated,
    noted,
    pod,
    read,
    vcuda,
    vgpu,
)

Limits = Mapping[str, int]
GI = 1 << 30
EXCLUSIVE = SharingPolicy.EXCLUSIVE
SHARED = SharingPolicy.SHARED
MOST, LEAST = DeviceOrder.MOST_ALLOCATED, DeviceOrder.LEAST_ALLOCATED
KOORD: dict[str, Any] = {"scheduler": "koord-scheduler"}
LABEL = "koordinator.sh/gpu-isolation-provider"
ISOLATED = {"pod.node_requirements.selector": ((LABEL, "HAMi-core"),)}
CARDS = hami(gpu=2)
PART = hami(gpu=1, gpumem=1000)
HALF = koord(shared=1, core=50, ratio=50)


def by(**choices: str) -> dict[str, Any]:
    return {"rules": Rules(**choices)}  # type: ignore[arg-type]


def hami_share(mib: int, cores: int, sharing: SharingPolicy = SHARED) -> dict[str, Any]:
    return {"mib": mib, "cores": cores, "sharing": sharing}


def ordered(
    order: DeviceOrder, *, links: bool = False, sharing: SharingPolicy = SHARED
) -> dict[str, Any]:
    return {"pod.device_order": order, "pod.prefer_links": links, "sharing": sharing}


POLICY = {"node_scheduler_policy": "spread", "gpu_scheduler_policy": "mutex,binpack"}
MEANINGS: dict[str, tuple[Asked, dict[str, Any], dict[str, Any]]] = {
    "item 18 two gpus with a part of each": (
        vgpu(number=2, memory=3000, cores=50),
        {},
        {"gpus": 2, "memory_units": 3000, "cores_percent": 50},
    ),
    "item 19 without an amount it is all of the memory": (vgpu(number=1), {}, {"mib_of_32": 32768}),
    "item 20 a percentage is of the memory": (
        vgpu(number=1, memory_percentage=20), {}, {"mib_of_32": 6553},
    ),
    "item 21 a percentage counts before an amount": (
        vgpu(number=1, memory_percentage=33, memory=3000), {}, {"mib_of_32": 10813},
    ),
    "an amount is exact": (vgpu(number=1, memory=3000), {}, {"mib_of_32": 3000}),
    "item 25 empty type entries are ignored and use overrides nouse": (
        vgpu(number=1),
        noted(use="V100, ,", nouse="T4"),
        {"pod.selection.types": ("V100",), "pod.selection.not_types": ()},
    ),
    "item 26 uuid lists are trimmed": (
        vgpu(number=1),
        noted(vgpu_uuid=" GPU-a , GPU-b", vgpu_nouuid="GPU-a"),
        {"pod.selection.uuids": ("GPU-a", "GPU-b"), "pod.selection.not_uuids": ("GPU-a",)},
    ),
    "item 28 a spread pod group becomes an anti affinity group": (
        vgpu(number=1),
        noted(spread="spread", group="g"),
        {"pod.anti_affinity_groups": ("ns/g",)},
    ),
    "item 29 without a policy the last device comes first": (
        vgpu(number=1), {}, {"pod.device_order": DeviceOrder.LAST},
    ),
    **{
        f"item 29 a policy orders devices: {order}": (
            vgpu(number=1), by(schedule_policy=order), {"pod.device_order": order},
        )
        for order in ("binpack", "spread")
    },
    "item 7 a number is of whole gpus": (
        gpushare(number=2),
        {},
        {"gpus": 2, "whole": True, "slotted": False, "pod.device_order": DeviceOrder.FIRST},
    ),
    "item 10 memory counts where both are requested": (
        gpushare(memory=1024, number=2), {}, {"gpus": 1, "memory_units": 1024},
    ),
    "units are of the nodes size": (gpushare(memory=1024), {}, {"mib_in_tens": 10240}),
    "memory needs the trigger where all containers request it": (
        (gpushare(memory=10) | {"leasehold.dev/share": 1},) * 2,
        {},
        {"pod.triggers": ("leasehold.dev/share",)},
    ),
    **{
        f"memory is the trigger where a container has {count} of ours": (
            (gpushare(memory=10) | {"leasehold.dev/share": 1}, gpushare(memory=10) | more),
            {},
            {"pod.triggers": ("volcano.sh/gpu-memory",)},
        )
        for count, more in ((0, {}), (2, {"leasehold.dev/share": 2}))
    },
    # gpu-manager
    "gpusharing 1 half a gpu and 4026531840 bytes of it": (
        vcuda(core=50, memory=15),
        {},
        {"gpus": 1, "cores": 50, "memory_bytes": 4026531840, "mib": 3840},
    ),
    **{
        f"gpusharing 2 parts and whole gpus pass: {core}": (
            vcuda(core=core, memory=4),
            {},
            {"gpus": gpus, "cores_percent": cores, "whole": whole},
        )
        for core, gpus, cores, whole in (
            *((1, 1, 1, False), (99, 1, 99, False)), *((100, 1, 0, True), (200, 2, 0, True)),
        )
    },
    "gpusharing 5 a block is 268435456 bytes whatever the nodes unit": (
        vcuda(core=1, memory=1), {}, {"memory_bytes": 268435456, "mib_in_tens": 256},
    ),
    "30 blocks": (vcuda(core=33, memory=30), {}, {"mib": 7680}),
    "64 blocks": (vcuda(core=10, memory=64), {}, {"mib": 16384}),
    "the fullest gpu is chosen first": (
        vcuda(core=10, memory=1),
        {},
        {"pod.device_order": DeviceOrder.TIGHTEST, "pod.triggers": ("tencent.com/vcuda-core",)},
    ),
    "a number": (hami(gpu=1), {}, hami_share(16384, 100, EXCLUSIVE) | {"pod.prefer_links": True}),
    "memory": (hami(gpu=1, gpumem=3000), {}, hami_share(3000, 0)),
    "memory and cores": (hami(gpu=1, gpumem=3000, gpucores=30), {}, hami_share(3000, 30)),
    "all cores": (
        hami(gpu=1, gpumem=3000, gpucores=100), {}, hami_share(3000, 100, EXCLUSIVE),
    ),
    "percent": (
        hami(gpu=1, gpumem_percentage=33), {}, hami_share(5406, 0) | {"mib_in_tens": 5406},
    ),
    "100 percent": (hami(gpu=1, gpumem_percentage=100), {}, hami_share(16384, 100, EXCLUSIVE)),
    "cores": (hami(gpu=1, gpucores=30), {}, hami_share(16384, 30)),
    "no memory": (hami(gpu=1, gpumem=0), {}, hami_share(16384, 100, EXCLUSIVE)),
    "an amount counts before a percentage": (
        hami(gpu=1, gpumem=3000, gpumem_percentage=50), {}, hami_share(3000, 0),
    ),
    "an amount is in the nodes unit": (hami(gpu=1, gpumem=3), {}, {"mib_in_tens": 30}),
    "nodes are packed and devices spread": (
        PART,
        {},
        ordered(LEAST)
        | {"pod.node_order": NodeOrder.BINPACK, "pod.allocation_weights": (1, 1, 1)}
        | {"pod.topology_scope": TopologyScope.NODE},
    ),
    "binpack": (PART, noted(devices="binpack"), ordered(MOST)),
    "numa": (hami(gpu=2, gpumem=1), noted(devices="numa,binpack"), ordered(MOST, links=True)),
    "the first of two orders": (PART, noted(devices="spread, binpack"), ordered(LEAST)),
    "mutex": (
        PART, noted(devices="mutex"), ordered(LEAST, sharing=SharingPolicy.IDLE_DEVICE),
    ),
    "mutex and binpack": (
        PART, noted(devices="mutex,binpack"), ordered(MOST, sharing=SharingPolicy.IDLE_DEVICE),
    ),
    "topology of one": (
        PART, noted(devices="topology-aware"), ordered(DeviceOrder.LEAST_LINKED, links=True),
    ),
    "topology of four": (
        hami(gpu=4, gpumem=1), noted(devices="topology-aware"), ordered(LEAST, links=True),
    ),
    "the operators policies": (
        PART,
        by(**POLICY),
        ordered(MOST, sharing=SharingPolicy.IDLE_DEVICE) | {"pod.node_order": NodeOrder.SPREAD},
    ),
    "the pods own policies": (
        PART,
        by(**POLICY) | noted(node="binpack", devices="spread"),
        ordered(LEAST) | {"pod.node_order": NodeOrder.BINPACK},
    ),
    **{
        f"weights {text}": (PART, noted(weights=text), {"pod.allocation_weights": weights})
        for text, weights in (
            *(("slot=1,core=1,memory=3", (1, 1, 3)), ("memory=3", (1, 1, 3))),
            ("slot=0, core=0.5", (0, 500, 1000)),
        )
    },
    "numa bind": (PART, noted(numa="true"), {"pod.topology_scope": TopologyScope.NUMA}),
    "no numa bind": (PART, noted(numa="false"), {"pod.topology_scope": TopologyScope.NODE}),
    "selections are trimmed and all of them count": (
        PART,
        noted(use="A100, ,V100", nouse="SXM", uuid=" GPU-a,GPU-b", nouuid="GPU-b"),
        {"pod.selection.types": ("A100", "V100"), "pod.selection.not_types": ("SXM",)}
        | {"pod.selection.uuids": ("GPU-a", "GPU-b"), "pod.selection.not_uuids": ("GPU-b",)},
    ),
    **{
        f"mode {mode}": (PART, noted(mode=mode), {"pod.selection.mode": wanted})
        for mode, wanted in (
            *(("mig", "mig"), ("hami-core", "hami-core")), *(("mig,hami-core", None), ("", None)),
        )
    },
    "a share may be an instance": (PART, {}, {"mig_allowed": True}),
    "a whole device may not": (hami(gpu=1), {}, {"mig_allowed": False}),
    "but in mig mode": (
        hami(gpu=1),
        noted(mode="mig"),
        {"mig_allowed": True, "whole": False, "sharing": SHARED},
    ),
    **{
        f"nvidia.com/gpu in pods of {scheduler}": (
            hami(gpu=1), {"scheduler": scheduler}, {"pod.dialect": dialect},
        )
        for scheduler, dialect in (
            *((name, "nvidia") for name in ("hami-scheduler", "leasehold", "volcano", "default")),
            ("koord-scheduler", "koordinator"),
        )
    },
    "koordinator 7 two containers of a half need two gpus": (
        (HALF, HALF),
        {},
        {"pod.distinct_devices": True, "gpus": 1, "memory_percent": 50, "cores_percent": 50}
        | {"pod.containers.1.container": "b", "pod.containers.1.memory_percent": 50},
    ),
    "whole gpus by nvidias name": (
        CARDS, KOORD, {"gpus": 2, "whole": True, "pod.triggers": ("nvidia.com/gpu",)},
    ),
    "all of a gpu": (
        koord(shared=1, core=100, ratio=100), {}, {"whole": True, "sharing": EXCLUSIVE},
    ),
    "all cores of a gpu": (
        koord(shared=1, core=100, ratio=50), {}, {"whole": False, "sharing": SHARED},
    ),
    "memory alone": (
        koord(shared=1, ratio=50), {}, {"cores": 0, "sharing": SharingPolicy.BEST_EFFORT},
    ),
    "koordinator 18 the least allocated gpu and node come first": (
        HALF,
        {},
        {"pod.device_order": LEAST, "pod.node_order": NodeOrder.SPREAD}
        | {"pod.allocation_weights": (0, 0, 1)},
    ),
    "koordinator 18 the most allocated gpu and node come first": (
        HALF,
        by(scoring_strategy="MostAllocated"),
        {"pod.device_order": MOST, "pod.node_order": NodeOrder.BINPACK}
        | {"pod.allocation_weights": (0, 0, 1)},
    ),
    "koordinator 29 a part of the memory needs isolation": (
        koord(shared=1, ratio=50), {}, ISOLATED,
    ),
    "koordinator 29 a part of the cores needs isolation": (
        koord(shared=1, core=30, ratio=100), {}, ISOLATED,
    ),
    "koordinator 29 a whole gpu needs no isolation": (
        koord(shared=1, core=100, ratio=100),
        {"labels": {LABEL: "HAMi-core"}},
        {"pod.node_requirements.selector": ()},
    ),
    **{
        f"the isolation label {value}": (
            koord(shared=1, ratio=50), {"labels": {LABEL: value}}, ISOLATED,
        )
        for value in ("HAMi-core", "hami-core", "HAMI-CORE")
    },
}  # fmt: skip


@pytest.mark.parametrize(("asked", "options", "meaning"), MEANINGS.values(), ids=MEANINGS)
def test_a_request_has_its_vendors_meaning(
    asked: Asked, options: dict[str, Any], meaning: dict[str, Any]
) -> None:
    request = read(*each(asked), **options)
    first = request.containers[0]
    derived = {
        "mib": required_memory_mib(first, device()),
        "mib_of_32": required_memory_mib(first, device(memory_mib=32768)),
        "mib_in_tens": required_memory_mib(first, device(unit_mib=10)),
        "cores": required_cores_percent(first),
    }

    def found(path: str) -> Any:
        where = first
        parts = path.split(".")
        if parts[0] == "pod":
            return reduce(_part, parts[1:], request)
        return derived[path] if path in derived else getattr(where, path)

    assert {path: found(path) for path in meaning} == meaning


def _part(whole: Any, name: str) -> Any:
    return whole[int(name)] if name.isdecimal() else getattr(whole, name)


OLD = {"kubernetes.io/gpu-core": 50, "kubernetes.io/gpu-memory-ratio": 20}
PARTS: dict[str, tuple[Limits, tuple[int, int | None, int | None, int | None] | None]] = {
    "koordinator 1 two nvidia gpus are two whole gpus": (CARDS, (2, 100, 100, None)),
    "koordinator 3 one percent": (koord(gpu=1), (1, 1, 1, None)),
    "koordinator 3 a whole gpu": (koord(gpu=100), (1, 100, 100, None)),
    "koordinator 3 two whole gpus": (koord(gpu=200), (2, 100, 100, None)),
    "koordinator 5 a ratio is divided over two gpus": (
        koord(shared=2, ratio=100), (2, None, 50, None),
    ),
    "koordinator 6 bytes are divided without rest": (
        koord(shared=3, memory=10 * GI), (3, None, None, 3579139413),
    ),
    "koordinator 8 zero counts as absent": (koord(shared=0, core=0, ratio=0), None),
    "koordinator 8 no cores": (koord(shared=1, core=0, ratio=50), (1, None, 50, None)),
    "koordinator 9 names of before 1.0 are read": (OLD, (1, 50, 20, None)),
    "published 1": (koord(gpu=50), (1, 50, 50, None)),
    "published 2": (koord(core=200, ratio=200), (2, 100, 100, None)),
    "published 3": (koord(core=50, ratio=200), (2, 25, 100, None)),
    "published 4": (koord(shared=2, core=100, ratio=100), (2, 50, 50, None)),
    "published 5": (koord(shared=2, core=100, memory=16 * GI), (2, 50, None, 8 * GI)),
    "published 6": (koord(shared=4, memory=160 * GI), (4, None, None, 40 * GI)),
    "published 7": (koord(shared=1, core=30, ratio=100), (1, 30, 100, None)),
    "published 8": (koord(ratio=60), (1, None, 60, None)),
    "published 9": (koord(memory=8 * GI), (1, None, None, 8 * GI)),
    "published 10": (koord(core=200, memory=64 * GI), (2, 100, None, 32 * GI)),
}  # fmt: skip


@pytest.mark.parametrize(("limits", "part"), PARTS.values(), ids=PARTS)
def test_koordinators_amounts_are_parts_of_each_gpu(
    limits: Limits, part: tuple[int, int | None, int | None, int | None] | None
) -> None:
    found = parse_part("main", limits)

    if part is None:
        assert found is None
        return
    assert found is not None
    whole = part[1:3] == (100, 100)
    ratio = 100 if found.whole else found.memory_percent
    assert (found.gpus, found.cores_percent or None, ratio, found.memory_bytes) == part
    assert (found.sharing is SharingPolicy.BEST_EFFORT) is (part[1] is None)
    assert found.whole is whole


FORGED = {"scheduling.koordinator.sh/device-allocated": '{"gpu":[{"minor":0}]}'}


@pytest.mark.parametrize(
    ("limits", "options"),
    [
        ({}, {}),
        ({"cpu": 1}, {}),
        (hami(gpu=0), {}),
        (vcuda(core=0, memory=0), {}),
        (koord(shared=0, ratio=0), {}),
        ({}, {"notes": FORGED}),
    ],
)
def test_a_pod_without_an_amount_requests_nothing(limits: Limits, options: Any) -> None:
    assert read(limits, **options).containers == ()


def test_koordinator_25_a_forged_allocation_changes_no_request() -> None:
    assert read(HALF, notes=FORGED) == read(HALF)
    assert not KOORDINATOR.request_annotations.intersection(FORGED)


@pytest.mark.parametrize(
    "rules", [Rules(disabled=("koordinator",)), Rules(enabled=("volcano-vgpu",))]
)
def test_where_koordinators_words_are_disabled_nvidias_are_not_its(rules: Rules) -> None:
    manifest = pod(CARDS, **KOORD)

    assert reads_nvidia_gpus(manifest, Rules())
    assert not reads_nvidia_gpus(manifest, rules)


def test_init_containers_and_sidecars_are_those_of_the_pod() -> None:
    warm = container_with("warm", limits=vcuda(core=10, memory=2), init=True)
    side = container_with("side", limits=vcuda(core=10, memory=2), init=True, sidecar=True)
    main = container_with("main", limits=vcuda(core=50, memory=4))

    request = read(warm, side, container_with("plain"), main)

    assert [(one.container, one.init) for one in request.containers] == [
        ("warm", True),
        ("side", False),
        ("main", False),
    ]


@pytest.mark.parametrize(
    ("use", "mib", "fits"),
    [
        (DeviceUse(cores_percent=50, shares=1), 3840, True),
        (DeviceUse(cores_percent=51, shares=1), 3840, False),
        (DeviceUse(), 3839, False),
    ],
)
def test_gpusharing_1_half_a_gpu_fits_what_is_left_of_it(
    use: DeviceUse, mib: int, *, fits: bool
) -> None:
    (half,) = read(vcuda(core=50, memory=15)).containers

    refusal = device_refusal(half, device(memory_mib=mib), use, memory_mib=3840)

    assert (refusal is None) is fits


ADDED: dict[str, tuple[Limits, Mapping[str, int | None]]] = {
    "memory of gpushare": (gpushare(memory=1024), {"leasehold.dev/share": 1}),
    "with its trigger": (gpushare(memory=1024) | {"leasehold.dev/share": 1}, {}),
    "with a trigger of 0": (gpushare(memory=1024) | {"leasehold.dev/share": 0}, {}),
    "no memory": (gpushare(memory=0), {}),
    "whole gpus of gpushare": (gpushare(number=1), {}),
    "memory of hami": (hami(gpumem=3000), hami(gpu=1)),
    "cores of hami": (hami(gpucores=30), hami(gpu=1)),
    "percent of hami": (hami(gpu=0, gpumem_percentage=50), hami(gpu=1)),
    "a number of hami": (hami(gpu=4, gpumem=3000), {}),
    "neither": ({"cpu": 1}, {}),
    "a priority": (hami(priority=1), {}),
    "koordinator 2 the shorthand is replaced by what it stands for": (
        koord(gpu=50) | {"cpu": 1},
        {"koordinator.sh/gpu": None, **koord(core=50, ratio=50, shared=1)},
    ),
    "koordinator 9 the count of old names": (OLD, koord(shared=1)),
    "a count of 1": (koord(core=100, ratio=50), koord(shared=1)),
    "a count by the ratio": (koord(core=100, ratio=200), koord(shared=2)),
    "a count by the cores": (koord(core=200, memory=GI), koord(shared=2)),
    "a count of the pod": (koord(shared=1, ratio=50), {}),
    "an invalid request": (koord(core=50), {}),
    "a part beside whole gpus, whose denial has the name as written": (koord(gpu=150), {}),
}


@pytest.mark.parametrize(("limits", "changes"), ADDED.values(), ids=ADDED)
def test_admission_adds_what_the_vendors_webhook_would(
    limits: Limits, changes: Mapping[str, int | None]
) -> None:
    assert amount_changes(limits) == changes


@pytest.mark.parametrize("limits", [koord(core=50, ratio=50), koord(gpu=200)])
def test_what_admission_has_completed_is_read(limits: dict[str, int]) -> None:
    changed = limits | amount_changes(limits)
    completed = {name: amount for name, amount in changed.items() if amount is not None}

    assert koordinated(completed).triggers == ("koordinator.sh/gpu.shared",)
