"""The pods of a campaign in all vocabularies, and what each of them requests; pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any
from zlib import crc32

from tests.proof.ledger import INIT
from tests.proof.observations import Hardware, Want

DEVICE_MIB = 81_920
"""Every device of a campaign is an A100 with 80 GB."""
DEVICE_CORES = 100
HARDWARE = Hardware(
    mib=DEVICE_MIB,
    slots=10,
    layouts={
        "group1": (9728,) * 7,
        "group2": (19_968, 19_968, 19_968, 9728),
        "group3": (40_192, 40_192),
        "group4": (80_896,),
    },
)
LEASE_ANNOTATION = "leasehold.dev/lease"
WANT_ANNOTATION = "campaign.test/want"
"""What the judge expects of the pod: devices, MiB and percent of each, 1 if exclusive, 1 if it
needs MIG instances."""
FORGED_ANNOTATION = "campaign.test/forged"
ANNOUNCED_ANNOTATION = "leasehold.dev/preempt-at"
RESIZED_ANNOTATION = "campaign.test/resized"
"""Its share was resized: what its container was given at its start counts no longer."""
URGENT = "campaign-urgent"
URGENT_PRIORITY = 1000
"""A priority class for whose pods others are evicted."""
PREEMPTIBLE = "leasehold.dev/preemptible"
GUARDED = "campaign.test/guarded"
"""A label of pods that a PodDisruptionBudget protects from every eviction."""
ISOLATION = "leasehold.dev/isolation"
"""By which a pod demands what holds its memory and cores."""
RESIZABLE = frozenset({"volcano-vgpu", "hami"})
WITH_PROCESSES = 4
"""One in so many pods runs a command as processes of the machine, which can outlive it."""
GANG_NAME = "gang.scheduling.koordinator.sh/name"
GANG_MIN = "gang.scheduling.koordinator.sh/min-available"
_SIZES_MIB = (1024, 2048, 4096, 10_240, 20_480, 40_960, 51_200)
_INSTANCES_MIB = (4096, 9000, 9000, 15_000, 30_000)
_CORES = (5, 10, 25, 50)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPlan:
    """One pod that a campaign creates."""

    name: str
    vocabulary: str
    want: Want
    limits: Mapping[str, str] = field(default_factory=dict)
    run_s: int = 100_000
    """How long its command runs."""
    term: Mapping[str, str] = field(default_factory=dict)
    """Annotations of how long it may run, or is expected to."""
    deadline_s: int | None = None
    """Its `activeDeadlineSeconds`."""
    urgent: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    isolation: str = ""
    init: bool = False
    """It has an init container, which requests what `main` requests, and ends before it."""
    sidecar: bool = False
    """It has a sidecar that requests no device."""
    gang: str = ""
    gang_min: int = 0
    forged_node: str = ""
    """It names this node itself, and may carry a forged grant; neither gets it a device."""


Choice = tuple[Want, Mapping[str, str]]


def _volcano_vgpu(random: Random) -> Choice:
    gpus = random.choice((1, 1, 1, 2))
    mib = random.choice(_SIZES_MIB)
    cores = random.choice(_CORES)
    limits = {"vgpu-number": gpus, "vgpu-memory": mib, "vgpu-cores": cores}
    return Want(gpus, mib, cores), {f"volcano.sh/{name}": str(n) for name, n in limits.items()}


def _volcano_gpushare(random: Random) -> Choice:
    mib = random.choice(_SIZES_MIB)
    return Want(1, mib), {"volcano.sh/gpu-memory": str(mib), "leasehold.dev/share": "1"}


def _tencent(random: Random) -> Choice:
    mib = random.choice(_SIZES_MIB)
    cores = random.choice(_CORES)
    blocks = {"vcuda-core": cores, "vcuda-memory": mib // 256}
    return Want(1, mib, cores), {f"tencent.com/{name}": str(n) for name, n in blocks.items()}


def _hami(random: Random) -> Choice:
    gpus = random.choice((1, 1, 2))
    mib = random.choice(_SIZES_MIB)
    cores = random.choice(_CORES)
    limits = {"gpu": gpus, "gpumem": mib, "gpucores": cores}
    return Want(gpus, mib, cores), {f"nvidia.com/{name}": str(n) for name, n in limits.items()}


def _koordinator(random: Random) -> Choice:
    mib = random.choice(_SIZES_MIB)
    cores = random.choice(_CORES)
    limits = {"gpu.shared": "1", "gpu-core": str(cores), "gpu-memory": f"{mib}Mi"}
    return Want(1, mib, cores), {f"koordinator.sh/{name}": text for name, text in limits.items()}


def _whole(_random: Random) -> Choice:
    return Want(1, DEVICE_MIB, DEVICE_CORES, exclusive=True), {"nvidia.com/gpu": "1"}


def _volcano_mig(random: Random) -> Choice:
    mib = random.choice(_INSTANCES_MIB)
    limits = {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": str(mib)}
    return Want(1, mib, mig=True), limits


VOCABULARIES: Mapping[str, Callable[[Random], Choice]] = {
    "volcano-vgpu": _volcano_vgpu,
    "volcano-gpushare": _volcano_gpushare,
    "tencent": _tencent,
    "hami": _hami,
    "koordinator": _koordinator,
    "nvidia": _whole,
    "volcano-mig": _volcano_mig,
}
_ANNOTATIONS = {"volcano-mig": {"volcano.sh/vgpu-mode": "mig"}}
DEMANDS = ("", "", "", "driver", "hami-core")
_DEADLINES_S = (10, 25, 120, 600)
"""The shortest may fill the gaps before starts that the longest delay."""
_LABELS: tuple[Mapping[str, str], ...] = ({PREEMPTIBLE: "false"}, {GUARDED: "yes"})


def choose_pod(random: Random, name: str, *, run_s: int, forged_node: str = "") -> PodPlan:
    """Return a pod of a random vocabulary and size."""
    vocabulary = random.choices(tuple(VOCABULARIES), weights=(5, 4, 4, 4, 4, 1, 3))[0]
    want, limits = VOCABULARIES[vocabulary](random)
    demands = DEMANDS if want.cores and not want.exclusive else ("",)
    return PodPlan(
        name=name,
        vocabulary=vocabulary,
        want=want,
        limits=limits,
        isolation=random.choice(demands),
        run_s=run_s,
        **_choose_term(random),
        urgent=random.random() < 0.1,
        labels=random.choice(_LABELS) if random.random() < 0.2 else {},
        init=random.random() < 0.15,
        sidecar=random.random() < 0.1,
        forged_node=forged_node,
    )


def _choose_term(random: Random) -> dict[str, Any]:
    """Return how long a pod may run, most often, or is expected to."""
    deadline_s = random.choice(_DEADLINES_S)
    terms: tuple[dict[str, Any], ...] = (
        {"deadline_s": deadline_s},
        {"term": {"leasehold.dev/max-run-time": f"{deadline_s}s"}},
        {"term": {"leasehold.dev/expected-run-time": f"{deadline_s}s"}},
        {},
    )
    return random.choices(terms, weights=(8, 4, 1, 1))[0]


def choose_preempting(random: Random, name: str) -> PodPlan:
    """Return a pod that seldom finds room, and for which others are evicted then."""
    want, limits = _whole(random)
    return PodPlan(name=name, vocabulary="nvidia", want=want, limits=limits, run_s=8, urgent=True)


def choose_gang(random: Random, name: str, size: int, *, run_s: int) -> tuple[PodPlan, ...]:
    """Return the members of a gang, all alike, of which all must be placed together."""
    want, limits = random.choice((_volcano_vgpu, _koordinator, _hami, *(_whole,) * 4))(random)
    term = _choose_term(random)
    return tuple(
        PodPlan(
            name=f"{name}-{number}",
            vocabulary="gang",
            want=want,
            limits=limits,
            run_s=run_s,
            **term,
            gang=name,
            gang_min=size,
        )
        for number in range(size)
    )


def manifest(pod: PodPlan) -> dict[str, Any]:
    """Return the pod as the API server takes it."""
    want = pod.want
    numbers = (want.gpus, want.mib, want.cores, want.exclusive, want.mig)
    annotations = {WANT_ANNOTATION: " ".join(str(int(number)) for number in numbers)}
    annotations |= {**_ANNOTATIONS.get(pod.vocabulary, {}), **pod.term}
    spec: dict[str, Any] = {"schedulerName": "volcano", "terminationGracePeriodSeconds": 1}
    if pod.isolation:
        annotations[ISOLATION] = pod.isolation
    if pod.gang:
        annotations |= {GANG_NAME: pod.gang, GANG_MIN: str(pod.gang_min)}
    if pod.forged_node:
        spec["nodeName"] = pod.forged_node
        annotations[FORGED_ANNOTATION] = "1"
        if crc32(pod.name.encode()) % 2:
            annotations |= {
                "volcano.sh/vgpu-ids-new": f"GPU-0,NVIDIA,{pod.want.mib},{pod.want.cores}:",
                "volcano.sh/bind-phase": "allocating",
            }
    if pod.deadline_s:
        spec["activeDeadlineSeconds"] = pod.deadline_s
    if pod.urgent:
        spec["priorityClassName"] = URGENT
    first = [_container(INIT, 1, pod.limits)] if pod.init else []
    beside = [_container("beside", pod.run_s, {}) | {"restartPolicy": "Always"}]
    spec["initContainers"] = first + (beside if pod.sidecar else [])
    main = spec["containers"] = [_container("main", pod.run_s, pod.limits)]
    if crc32(pod.name.encode()) % WITH_PROCESSES == 0:
        main[0]["command"] = ["sh", "-c", f"sleep {pod.run_s} & wait"]
    spec["restartPolicy"] = "Never"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": pod.name, "annotations": annotations, "labels": dict(pod.labels)},
        "spec": spec,
    }


def _container(name: str, run_s: int, limits: Mapping[str, str]) -> dict[str, Any]:
    return {
        "name": name,
        "image": "busybox",
        "command": ["sleep", str(run_s)],
        "resources": {"limits": dict(limits)},
    }
