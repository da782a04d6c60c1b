"""One number per node and kind of request: it says whether the node may fit, and how well.

A *gap* is the most that a share could get on a node, n shares at once: the n-th largest of its
devices' free memory. A *rank* packs the gap with how full the node is, so that nodes sorted by
rank are sorted by preference: for BINPACK the tightest gap first and then the fullest node; for
SPREAD the emptiest node first and then the widest gap.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from services.placer.choice.device_choice import room_for
from services.placer.mirror.node_mirror import DeviceState, NodeState
from shared.model.device import IDLE_BEFORE, MIB, DeviceMode
from shared.model.request import GpuRequest, NodeOrder, PodRequest

LEVEL_BITS = 6
TOP_LEVEL = (1 << LEVEL_BITS) - 1
GAP_BITS = 40
TOP_GAP = (1 << GAP_BITS) - 1
PREFERENCE_SHIFT = GAP_BITS + LEVEL_BITS
PREFERENCE_TOP = 1 << 20
"""More than any pod's weights add up to; they do not go far below zero either."""

Rank = int
Ranking = Callable[[NodeState], Rank | None]


UNITS, MIBS, PERCENT, WHOLE, NONE = "units", "mib", "percent", "whole", "none"
"""In what the gap is counted, so that it compares with what the pod wrote. WHOLE: 1 where nothing
is taken, else 0. NONE: no device is asked for."""


class Kind(NamedTuple):
    """What requests have in common that share one index; a plain filter, never too strict."""

    measure: str
    gpus: int
    cores: int
    """Percent of a device's cores that must be unreserved: see `device_choice.room_for`."""
    idle: bool
    """The device must be idle."""
    slotted: bool
    packs: bool
    """BINPACK, not SPREAD."""
    instances: bool = False
    """Of MIG devices, the gap being their largest free instance; else of all others."""


def kind_of(request: PodRequest, mode: DeviceMode = DeviceMode.HAMI_CORE) -> tuple[Kind, int]:
    """Return the kind of a request, for devices of one mode, and the gap it needs at least.

    Of several containers the most demanding one stands for all; whether the others fit beside it
    is for the exact choice to say.
    """
    packs = request.node_order is NodeOrder.BINPACK
    containers = request.containers
    if not containers:
        return Kind(NONE, 0, 0, False, False, packs), 0
    lead = containers[0] if len(containers) == 1 else max(containers, key=_demand)
    measure, need = _need(lead)
    if mode is DeviceMode.MIG:
        if lead.wants_all_memory:
            measure, need = WHOLE, 1
        return Kind(measure, lead.gpus, 0, False, False, packs, instances=True), need
    if request.same_device and measure == UNITS:
        need = max(need, sum(c.memory_units or 0 for c in containers if not c.init))
    idle, slotted = lead.sharing in IDLE_BEFORE, lead.slotted and not lead.slots
    return Kind(measure, lead.gpus, room_for(lead), idle, slotted, packs), need


def _demand(container: GpuRequest) -> tuple[int, bool, int, int]:
    measure, need = _need(container)
    return (
        container.gpus,
        measure == WHOLE,
        need,
        container.cores_percent,
    )


def _need(container: GpuRequest) -> tuple[str, int]:
    if not container.whole:
        if container.memory_percent is not None:
            return PERCENT, container.memory_percent
        if container.memory_bytes is not None:
            return MIBS, -(-container.memory_bytes // MIB)
        if container.memory_units is not None:
            return UNITS, container.memory_units
    return WHOLE, 1


def ranking_of(kind: Kind) -> Ranking:
    """Return the function that ranks a node for one kind, None where it cannot fit."""
    gap_of = _gap_of(kind)
    if kind.packs:

        def rank_tightest(node: NodeState) -> Rank | None:
            gap = gap_of(node)
            return None if gap < 0 else gap << LEVEL_BITS | TOP_LEVEL - level_of(node)

        return rank_tightest

    def rank_emptiest(node: NodeState) -> Rank | None:
        gap = gap_of(node)
        return None if gap < 0 else level_of(node) << GAP_BITS | TOP_GAP - gap

    return rank_emptiest


def level_of(node: NodeState) -> int:
    """Return how full a node is, 0 (idle) to 63, by its devices or else by its cpu."""
    if node.devices:
        if not node.shares or not node.total:
            return 0
        level = 1 + 62 * node.taken // node.total
        return min(level, TOP_LEVEL)
    total = node.facts.allocatable.get("cpu", 0)
    taken = total - node.free.get("cpu", 0)
    return min(TOP_LEVEL, 1 + 62 * taken // total) if taken > 0 and total > 0 else 0


def _gap_of(kind: Kind) -> Callable[[NodeState], int]:
    if kind.measure == NONE:
        return lambda node: len(node.devices)
    nth, gaps_of, alone = kind.gpus, _gaps_of(kind), kind.idle or kind.instances

    def gap_of(node: NodeState) -> int:
        gaps = gaps_of(node.devices if alone else node.sharing)
        if len(gaps) < nth:
            return -1
        if nth == 1:
            return max(gaps)
        gaps.sort()
        return gaps[-nth] if nth else 0

    return gap_of


def _gaps_of(kind: Kind) -> Callable[[Sequence[DeviceState]], list[int]]:
    cores = kind.cores
    if kind.instances:
        instance = _INSTANCE_MEASURES[kind.measure]
        return lambda devices: [instance(d) for d in devices if d.instance]
    if kind.measure == UNITS and kind.slotted and not kind.idle:
        return lambda devices: [d.free_units for d in devices if d.slotted_room >= cores]
    measure, slotted, idle = _MEASURES[kind.measure], kind.slotted, kind.idle
    return lambda devices: [
        measure(d)
        for d in devices
        if (d.slotted_room if slotted else d.room) >= cores and not (idle and d.shares)
    ]


def _free_units(device: DeviceState) -> int:
    return device.free_units


def _free_mib(device: DeviceState) -> int:
    return device.total - device.memory


def _free_percent(device: DeviceState) -> int:
    """Return the largest percentage whose share, rounded down to units, is free."""
    units, free = device.total // device.unit, device.free_units
    return 100 if free >= units else (100 * (free + 1) - 1) // units


def _is_untouched(device: DeviceState) -> int:
    return int(device.memory <= 0)


_MEASURES: Mapping[str, Callable[[DeviceState], int]] = {
    UNITS: _free_units,
    MIBS: _free_mib,
    PERCENT: _free_percent,
    WHOLE: _is_untouched,
}


def _instance_percent(device: DeviceState) -> int:
    """Return the largest percentage of the device's memory for which an instance is free."""
    return min(
        99, (100 * (device.instance // device.unit + 1) - 1) // (device.total // device.unit)
    )


_INSTANCE_MEASURES: Mapping[str, Callable[[DeviceState], int]] = {
    UNITS: lambda device: device.instance // device.unit,
    MIBS: lambda device: device.instance,
    PERCENT: _instance_percent,
    WHOLE: lambda device: int(device.instance >= device.largest),
}


def has_gap(rank: Rank, need: int, *, packs: bool) -> bool:
    """Say whether a rank stands for a gap of `need` or more."""
    if packs:
        return rank >> LEVEL_BITS >= need
    return TOP_GAP - (rank & TOP_GAP) >= need


def skip_to(rank: Rank, need: int, *, packs: bool) -> Rank:
    """Return the least rank from `rank` on that may have the gap, if `rank` itself has not."""
    return need << LEVEL_BITS if packs else ((rank >> GAP_BITS) + 1) << GAP_BITS


def is_band(one: Rank, other: Rank, *, packs: bool) -> bool:
    """Say whether a choice between nodes of two ranks may be left to chance.

    Packing never opens an idle node while a used one fits; spreading keeps to one level.
    """
    if packs:
        idle = one & TOP_LEVEL == TOP_LEVEL
        return idle == (other & TOP_LEVEL == TOP_LEVEL) and not (one ^ other) >> PREFERENCE_SHIFT
    return not (one ^ other) >> GAP_BITS


def preferred_rank(rank: Rank, preference: int) -> Rank:
    """Put the pod's own preference before everything else in a rank."""
    return (PREFERENCE_TOP - preference << PREFERENCE_SHIFT) + rank
