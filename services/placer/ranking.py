"""One number per node and kind of request: it says whether the node may fit, and how well.

A *gap* is the most that a share could get on a node, n shares at once: the n-th largest of its
devices' free memory. A *rank* packs the gap with how full the node is, so that nodes sorted by
rank are sorted by preference: for BINPACK the tightest gap first and then the fullest node; for
SPREAD the emptiest node first and then the widest gap.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from services.placer.mirrored import DeviceState, NodeState
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


class Measure(StrEnum):
    """In what the gap is counted, so that it compares with what the pod wrote."""

    UNITS = "units"
    PERCENT = "percent"
    WHOLE = "whole"
    """1 where nothing is taken, else 0."""
    NONE = "none"
    """No device is asked for."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What requests have in common that share one index; a plain filter, never too strict."""

    measure: Measure
    gpus: int
    cores: int
    slotted: bool
    order: NodeOrder


def kind_of(request: PodRequest) -> tuple[Kind, int]:
    """Return the kind of a request and the gap it needs at least.

    Of several containers the most demanding one stands for all; whether the others fit beside it
    is for the exact choice to say.
    """
    order = request.node_order
    if not request.containers:
        return Kind(Measure.NONE, 0, 0, False, order), 0
    lead = (
        max(request.containers, key=_demand)
        if len(request.containers) > 1
        else (request.containers[0])
    )
    measure, need = _need(lead)
    if request.same_device and measure is Measure.UNITS:
        need = max(need, _together(request))
    cores = 100 if lead.whole else lead.cores_percent
    return Kind(measure, lead.gpus, cores, lead.slotted, order), need


def _demand(container: GpuRequest) -> tuple[int, bool, int, int]:
    everything = container.whole or (
        container.memory_percent is None and container.memory_units is None
    )
    return (
        container.gpus,
        everything,
        container.memory_units or container.memory_percent or 0,
        container.cores_percent,
    )


def _need(container: GpuRequest) -> tuple[Measure, int]:
    if not container.whole:
        if container.memory_percent is not None:
            return Measure.PERCENT, container.memory_percent
        if container.memory_units is not None:
            return Measure.UNITS, container.memory_units
    return Measure.WHOLE, 1


def _together(request: PodRequest) -> int:
    return sum(c.memory_units or 0 for c in request.containers if not c.init)


def ranking_of(kind: Kind) -> Ranking:
    """Return the function that ranks a node for one kind, None where it cannot fit."""
    gap_of = _gap_of(kind)
    if kind.order is NodeOrder.BINPACK:

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
    if not node.devices:
        allocatable = node.facts.allocatable.get("cpu", 0)
        taken, total = allocatable - node.free.get("cpu", 0), allocatable
        return min(TOP_LEVEL, 1 + 62 * taken // total) if taken > 0 and total > 0 else 0
    taken, idle = 0, True
    for device in node.devices:
        taken += device.memory
        if device.shares:
            idle = False
    if idle or not node.total:
        return 0
    return min(TOP_LEVEL, 1 + 62 * taken // node.total)


def _gap_of(kind: Kind) -> Callable[[NodeState], int]:
    if kind.measure is Measure.NONE:
        return lambda node: len(node.devices)
    nth, cores, slotted = kind.gpus, kind.cores, kind.slotted
    gap_on = _GAPS[kind.measure]

    def gap_of(node: NodeState) -> int:
        gaps = [
            gap_on(device)
            for device in node.devices
            if device.cores < 100
            and device.cores + cores <= 100
            and device.healthy
            and (not slotted or device.shares < device.slots)
            and (cores != 100 or device.shares == 0)
        ]
        if len(gaps) < nth:
            return -1
        if nth == 1:
            return max(gaps)
        gaps.sort()
        return gaps[-nth] if nth else 0

    return gap_of


def _free_units(device: DeviceState) -> int:
    return max(device.total - device.memory, 0) // device.unit


def _free_percent(device: DeviceState) -> int:
    """Return the largest percentage whose share, rounded down to units, is free."""
    units = device.total // device.unit
    free = _free_units(device)
    return 100 if free >= units else (100 * (free + 1) - 1) // units


def _is_untouched(device: DeviceState) -> int:
    return int(device.memory <= 0)


_GAPS: dict[Measure, Callable[[DeviceState], int]] = {
    Measure.UNITS: _free_units,
    Measure.PERCENT: _free_percent,
    Measure.WHOLE: _is_untouched,
}


def has_gap(order: NodeOrder, rank: Rank, need: int) -> bool:
    """Say whether a rank stands for a gap of `need` or more."""
    if order is NodeOrder.BINPACK:
        return rank >> LEVEL_BITS >= need
    return TOP_GAP - (rank & TOP_GAP) >= need


def skip_to(order: NodeOrder, rank: Rank, need: int) -> Rank:
    """Return the least rank from `rank` on that can have a gap of `need`: the next level's, or."""
    if order is NodeOrder.BINPACK:
        return need << LEVEL_BITS
    return ((rank >> GAP_BITS) + 1) << GAP_BITS


def band_of(order: NodeOrder, rank: Rank) -> tuple[int, int]:
    """Return what two ranks must have in common for a choice between them to be a toss-up.

    Packing never opens an idle node while a used one fits; spreading keeps to one level.
    """
    if order is NodeOrder.BINPACK:
        return rank >> PREFERENCE_SHIFT, int(rank & TOP_LEVEL == TOP_LEVEL)
    return rank >> GAP_BITS, 0


def preferred_rank(rank: Rank, preference: int) -> Rank:
    """Put the pod's own preference before everything else in a rank."""
    return (PREFERENCE_TOP - preference << PREFERENCE_SHIFT) + rank
