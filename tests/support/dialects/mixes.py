"""Random pods in every dialect with their expected shares, computed without our parsers.

What is expected here follows the published rules of the vendors and the roundings of
`docs/compatibility.md`; nothing of it comes from `shared.dialects` or `shared.model.devices`.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from shared.dialects.dialect import ContainerManifest, PodManifest
from shared.model.devices.device import Device
from shared.model.names import Namespace
from tests.support.choices import among

MIB = 1 << 20
BLOCK = 256 * MIB
Bytes = Callable[[Device], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedShare:
    """The expected share of each of a container's devices."""

    container: str
    gpus: int
    memory: Bytes
    """Memory limit in bytes on a device that is not partitioned."""
    all_memory: bool = False
    """No amount was requested: of a partitioned device, the largest instance."""
    cores: int = 0
    """Percent that it reserves."""
    alone: bool = False
    """Its devices must be idle and are exclusive."""
    idle: bool = False
    """Its devices must be idle; later pods may share them."""
    joins_reserved: bool = False
    """It may share a device whose cores are all reserved."""
    slots: int | None = None
    """Shares that a device may have with it: None any number, 0 as many as the device has slots."""
    init: bool = False
    """It ends before the next container starts."""
    instances: bool = False
    """A MIG instance is accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedPod:
    """A pod and its expected shares."""

    dialect: str
    manifest: PodManifest
    parts: tuple[ExpectedShare, ...]
    one_device: bool = False
    """All of its containers share a device."""
    distinct: bool = False
    """No two of its containers share a device."""
    mode: str = ""
    """The required mode of devices; empty: see `ExpectedShare.instances`."""

    def part(self, container: str) -> ExpectedShare:
        return next(part for part in self.parts if part.container == container)


def whole_units(device: Device) -> int:
    """All of a device, in bytes: the units of it that can be leased."""
    return device.memory_mib // device.unit_mib * device.unit_mib * MIB


def units(amount: int) -> Bytes:
    return lambda device: amount * device.unit_mib * MIB


def percent_of_units(percent: int) -> Bytes:
    """Volcano's percentage: whole units of the registered units, rounded down."""
    return lambda device: (
        device.memory_mib // device.unit_mib * percent // 100 * device.unit_mib * MIB
    )


def percent_of_mib(percent: int) -> Bytes:
    """Koordinator's and HAMi's percentage: whole MiB, rounded down."""
    return lambda device: device.memory_mib * percent // 100 * MIB


def exactly(amount: int) -> Bytes:
    return lambda _: amount


few = st.sampled_from([1, 1, 1, 2, 3])
sizes = st.sampled_from([1, 7, 100, 511, 700, 1024, 1500, 2000])
cores_of = st.sampled_from([1, 10, 33, 50, 60, 99, 100])


def _pod(
    containers: list[ContainerManifest], notes: dict[str, str] | None = None, scheduler: str = ""
) -> PodManifest:
    ordered = sorted(containers, key=lambda container: not container.init)
    return PodManifest(
        namespace=Namespace("ns"),
        containers=tuple(ordered),
        annotations=notes or {},
        scheduler=scheduler,
    )


def _names(draw: Any) -> list[str]:
    return [f"c{n}" for n in range(draw(among(1, 1, 1, 2, 3)))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """Which containers of a pod, from the first on, are init containers, and which are sidecars."""

    inits: int
    sidecars: Collection[int] = ()

    def container(self, place: int, name: str, limits: dict[str, int | None]) -> ContainerManifest:
        named = {resource: amount for resource, amount in limits.items() if amount is not None}
        init = place < self.inits
        return ContainerManifest(name=name, limits=named, init=init, sidecar=place in self.sidecars)

    def runs_before(self, place: int) -> bool:
        """Whether a container has ended when the next one starts."""
        return place < self.inits and place not in self.sidecars


@st.composite
def _kinds(draw: Any, names: list[str]) -> Kinds:
    inits = draw(among(0, 0, 0, *range(len(names))))
    return Kinds(inits=inits, sidecars=[n for n in range(inits) if draw(st.integers(0, 2)) == 0])


ORDINARY = Kinds(inits=0)


@st.composite
def volcano_vgpu(draw: Any) -> ExpectedPod:
    mode = draw(among("", "", "", "hami-core", "mig"))
    containers = []
    parts = []
    for name in _names(draw):
        number = draw(few)
        memory = draw(st.one_of(st.none(), sizes))
        percent = draw(among(None, None, None, 1, 20, 33, 100))
        cores = draw(st.one_of(st.none(), cores_of))
        limits = {
            "volcano.sh/vgpu-number": number,
            "volcano.sh/vgpu-memory": memory,
            "volcano.sh/vgpu-memory-percentage": percent,
            "volcano.sh/vgpu-cores": cores,
        }
        containers.append(ORDINARY.container(0, name, limits))
        bytes_of = (
            percent_of_units(percent)
            if percent is not None
            else units(memory)
            if memory
            else whole_units
        )
        parts.append(
            ExpectedShare(
                container=name,
                gpus=number,
                memory=bytes_of,
                all_memory=percent == 100 or (percent is None and not memory),
                cores=cores or 0,
                alone=cores == 100,
                slots=0,
                instances=True,
            )
        )
    notes = {"volcano.sh/vgpu-mode": mode} if mode else {}
    return ExpectedPod(
        dialect="volcano-vgpu",
        manifest=_pod(containers, notes, "volcano"),
        parts=tuple(parts),
        mode=mode,
    )


@st.composite
def gpushare(draw: Any) -> ExpectedPod:
    containers = []
    parts = []
    names = _names(draw)
    kinds = draw(_kinds(names))
    for place, name in enumerate(names):
        memory = draw(sizes)
        init = kinds.runs_before(place)
        limits = {"volcano.sh/gpu-memory": memory, "leasehold.dev/share": 1}
        containers.append(kinds.container(place, name, limits))
        parts.append(ExpectedShare(container=name, gpus=1, memory=units(memory), init=init))
    return ExpectedPod(
        dialect="volcano-gpushare",
        manifest=_pod(containers, scheduler="volcano"),
        parts=tuple(parts),
        one_device=True,
    )


@st.composite
def gpu_number(draw: Any) -> ExpectedPod:
    number = draw(few)
    part = ExpectedShare(
        container="c0", gpus=number, memory=whole_units, all_memory=True, cores=100, alone=True
    )
    container = ORDINARY.container(0, "c0", {"volcano.sh/gpu-number": number})
    return ExpectedPod(dialect="volcano-gpushare", manifest=_pod([container]), parts=(part,))


@st.composite
def vcuda(draw: Any) -> ExpectedPod:
    containers = []
    parts = []
    names = _names(draw)
    kinds = draw(_kinds(names))
    for place, name in enumerate(names):
        cards = draw(among(0, 0, 0, 0, 1, 2))
        init = kinds.runs_before(place)
        core = cards * 100 or draw(st.integers(1, 99))
        blocks = draw(st.integers(0 if cards else 1, 7))
        limits = {"tencent.com/vcuda-core": core, "tencent.com/vcuda-memory": blocks or None}
        containers.append(kinds.container(place, name, limits))
        parts.append(
            ExpectedShare(
                container=name,
                gpus=cards or 1,
                memory=whole_units if cards else exactly(blocks * BLOCK),
                all_memory=bool(cards),
                cores=100 if cards else core,
                alone=bool(cards),
                init=init,
            )
        )
    return ExpectedPod(dialect="tencent", manifest=_pod(containers), parts=tuple(parts))


@st.composite
def hami(draw: Any) -> ExpectedPod:
    mode = draw(among("", "", "", "hami-core", "mig"))
    mutex = draw(among(False, False, False, True))
    containers = []
    parts = []
    names = _names(draw)
    kinds = draw(_kinds(names))
    for place, name in enumerate(names):
        number = draw(few)
        init = kinds.runs_before(place)
        memory = draw(st.one_of(st.none(), sizes))
        percent = draw(among(None, None, 1, 33, 50, 100))
        cores = draw(st.one_of(st.none(), cores_of))
        limits = {
            "nvidia.com/gpu": number,
            "nvidia.com/gpumem": memory,
            "nvidia.com/gpumem-percentage": percent,
            "nvidia.com/gpucores": cores,
        }
        containers.append(kinds.container(place, name, limits))
        everything = memory is None and percent in {None, 100}
        whole = everything and cores in {None, 100} and mode != "mig"
        part_of = (
            units(memory)
            if memory
            else percent_of_mib(percent)
            if percent is not None
            else whole_units
        )
        parts.append(
            ExpectedShare(
                container=name,
                gpus=number,
                memory=whole_units if whole else part_of,
                all_memory=everything,
                cores=100 if whole else cores or 0,
                alone=whole or (cores == 100 and mode != "mig"),
                idle=mutex,
                slots=0,
                init=init,
                instances=not whole,
            )
        )
    notes = {"nvidia.com/vgpu-mode": mode} if mode else {}
    if mutex:
        notes["hami.io/gpu-scheduler-policy"] = "mutex"
    manifest = _pod(containers, notes, "hami-scheduler")
    return ExpectedPod(dialect="nvidia", manifest=manifest, parts=tuple(parts), mode=mode)


@st.composite
def koordinator(draw: Any) -> ExpectedPod:
    in_bytes = draw(st.booleans())
    containers = []
    parts = []
    names = _names(draw)
    kinds = draw(_kinds(names))
    for place, name in enumerate(names):
        cards = draw(few)
        init = kinds.runs_before(place)
        core = draw(st.one_of(st.none(), cores_of))
        ratio = None if in_bytes else draw(among(1, 10, 29, 33, 50, 100))
        memory = draw(st.integers(cards * MIB, 3000 * MIB)) if in_bytes else None
        limits = {
            "koordinator.sh/gpu.shared": cards,
            "koordinator.sh/gpu-core": None if core is None else core * cards,
            "koordinator.sh/gpu-memory-ratio": None if ratio is None else ratio * cards,
            "koordinator.sh/gpu-memory": memory,
        }
        containers.append(kinds.container(place, name, limits))
        whole = core == 100 and ratio == 100
        part_of = exactly((memory or 0) // cards) if in_bytes else percent_of_mib(ratio or 0)
        parts.append(
            ExpectedShare(
                container=name,
                gpus=cards,
                memory=whole_units if whole else part_of,
                cores=core or 0,
                alone=whole,
                joins_reserved=core is None,
                slots=100,
                init=init,
            )
        )
    return ExpectedPod(
        dialect="koordinator",
        manifest=_pod(containers, scheduler="koord-scheduler"),
        parts=tuple(parts),
        distinct=True,
    )


@st.composite
def vendor_cards(draw: Any) -> ExpectedPod:
    """`nvidia.com/gpu` for Koordinator's scheduler, and for all others."""
    scheduler = draw(among("koord-scheduler", "default"))
    number = draw(few)
    koord = scheduler == "koord-scheduler"
    part = ExpectedShare(
        container="c0",
        gpus=number,
        memory=whole_units,
        all_memory=True,
        cores=100,
        alone=True,
        slots=100 if koord else 0,
    )
    return ExpectedPod(
        dialect="koordinator" if koord else "nvidia",
        manifest=_pod(
            [ORDINARY.container(0, "c0", {"nvidia.com/gpu": number})], scheduler=scheduler
        ),
        parts=(part,),
    )


BY_NAME = {
    "volcano vGPU": volcano_vgpu(),
    "gpushare, memory": gpushare(),
    "gpushare, cards": gpu_number(),
    "gpu-manager": vcuda(),
    "HAMi": hami(),
    "Koordinator": koordinator(),
    "whole cards": vendor_cards(),
}
mixed = st.one_of(*BY_NAME.values())
