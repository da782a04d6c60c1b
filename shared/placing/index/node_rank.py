"""Ranks of nodes: one number per node and kind of request, for how well the node fits; pure.

A node's *headroom* for n shares is the most that each of them can get at once: the n-th largest of
its devices' free memory. A *rank* packs the headroom with how full the node is. The order of ranks
is the order of preference: for BINPACK the smallest headroom first and then the fullest node; for
SPREAD the emptiest node first and then the largest headroom.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Final, NamedTuple

from shared.model.device import IDLE_BEFORE, MIB, DeviceMode
from shared.model.request import GpuRequest, NodeOrder, PodRequest
from shared.placing.choice.container_choice import required_free_cores
from shared.placing.mirror.node_mirror import DeviceAmounts, MirroredDevice, MirroredNode

FULLNESS_BITS: Final = 6
CACHED_AMOUNTS: Final = 4
"""For each node, so many ways to count what its devices have free."""
MAX_FULLNESS: Final = (1 << FULLNESS_BITS) - 1
HEADROOM_BITS: Final = 40
MAX_HEADROOM: Final = (1 << HEADROOM_BITS) - 1
Rank = int
Ranking = Callable[[MirroredNode], Rank | None]


UNITS, MIBS, PERCENT, WHOLE, NONE = "units", "mib", "percent", "whole", "none"
FREEST = "freest"
"""The unit of the headroom: that of the request. WHOLE: 1 if nothing is used, else 0. Where no
device is requested, NONE: the number of devices; FREEST: the units that the freest one has free."""


class RequestKind(NamedTuple):
    """The properties of requests that share ranked nodes; a filter that is never too strict."""

    measure: str
    gpus: int
    cores: int
    """Percent of a device's cores that must be free: see `required_free_cores`."""
    idle: bool
    """The device must be idle."""
    slotted: bool
    packs: bool
    """Not SPREAD."""
    instances: bool = False
    """The headroom is the largest free instance of devices in MIG mode; else of other devices."""


def request_kind(
    request: PodRequest, mode: DeviceMode = DeviceMode.HAMI_CORE
) -> tuple[RequestKind, int]:
    """Return the kind of a request, for devices of one mode, and the headroom that it needs.

    Of several containers the most demanding one stands for all; the exact choice of devices
    decides whether the others fit beside it.
    """
    packs = request.node_order is not NodeOrder.SPREAD
    containers = request.containers
    if not containers:
        compared = request.node_order is NodeOrder.FRAGMENTATION
        return RequestKind(FREEST if compared else NONE, 0, 0, False, False, packs), 0
    lead = containers[0] if len(containers) == 1 else max(containers, key=_demand)
    measure, need = _need(lead)
    if mode is DeviceMode.MIG:
        if lead.wants_all_memory:
            measure, need = WHOLE, 1
        return RequestKind(measure, lead.gpus, 0, False, False, packs, instances=True), need
    if request.same_device and measure == UNITS:
        need = max(need, sum(c.memory_units or 0 for c in containers if not c.init))
    idle, slotted = lead.sharing in IDLE_BEFORE, lead.slotted and not lead.slots
    return RequestKind(measure, lead.gpus, required_free_cores(lead), idle, slotted, packs), need


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


def ranking_for(kind: RequestKind) -> Ranking:
    """Return the function that ranks a node for one kind, None where it cannot fit."""
    headroom = headroom_of(kind)
    if kind.packs:

        def rank_tightest(node: MirroredNode) -> Rank | None:
            free = headroom(node)
            return None if free < 0 else free << FULLNESS_BITS | MAX_FULLNESS - fullness(node)

        return rank_tightest

    def rank_emptiest(node: MirroredNode) -> Rank | None:
        free = headroom(node)
        return None if free < 0 else fullness(node) << HEADROOM_BITS | MAX_HEADROOM - free

    return rank_emptiest


def fullness(node: MirroredNode) -> int:
    """Return how full a node is, 0 (idle) to 63, by its devices or else by its cpu."""
    if node.devices:
        if not node.shares or not node.total_mib:
            return 0
        full = 1 + 62 * node.used_mib // node.total_mib
        return min(MAX_FULLNESS, full)
    total = node.facts.allocatable.get("cpu", 0)
    used = total - node.free_resources.get("cpu", 0)
    return min(MAX_FULLNESS, 1 + 62 * used // total) if used > 0 and total > 0 else 0


def headroom_of(kind: RequestKind) -> Callable[[MirroredNode], int]:
    """Return the function for the headroom of a node; -1: it has too few devices."""
    if kind.measure == NONE:
        return lambda node: len(node.devices)
    if kind.measure == FREEST:
        return lambda node: max([device.free_units for device in node.devices], default=0)
    if not kind.gpus:
        return lambda _node: 0
    amounts_of = (
        _instance_amounts_of(kind.measure)
        if kind.instances
        else _share_amounts_of(kind.measure, kind.cores, kind.slotted, kind.idle)
    )
    nth = kind.gpus

    def nth_largest(node: MirroredNode) -> int:
        amounts = node.amounts.get(amounts_of)
        if amounts is None:
            if len(node.amounts) >= CACHED_AMOUNTS:
                node.amounts.clear()
            amounts = node.amounts[amounts_of] = amounts_of(node)
            amounts.sort()
        return amounts[-nth] if len(amounts) >= nth else -1

    return nth_largest


@cache
def _instance_amounts_of(measure: str) -> DeviceAmounts:
    headroom = _INSTANCE_HEADROOM[measure]
    return lambda node: [headroom(device) for device in node.devices if device.free_instance_mib]


@cache
def _share_amounts_of(measure: str, cores: int, slotted: bool, idle: bool) -> DeviceAmounts:
    if measure == UNITS and slotted and not idle:
        return lambda node: [
            d.free_units for d in node.shareable_devices if d.free_slot_cores >= cores
        ]
    headroom = _SHARE_HEADROOM[measure]
    return lambda node: [
        headroom(d)
        for d in (node.devices if idle else node.shareable_devices)
        if (d.free_slot_cores if slotted else d.free_cores) >= cores and not (idle and d.shares)
    ]


def _free_units(device: MirroredDevice) -> int:
    return device.free_units


def _free_mib(device: MirroredDevice) -> int:
    return device.total_mib - device.used_mib


def _free_percent(device: MirroredDevice) -> int:
    """Return the largest percentage whose share, rounded down to units, is free."""
    units, free = device.total_mib // device.unit_mib, device.free_units
    return 100 if free >= units else (100 * (free + 1) - 1) // units


def _is_unused(device: MirroredDevice) -> int:
    return int(device.used_mib <= 0)


_SHARE_HEADROOM: Mapping[str, Callable[[MirroredDevice], int]] = {
    UNITS: _free_units,
    MIBS: _free_mib,
    PERCENT: _free_percent,
    WHOLE: _is_unused,
}


def _instance_units(device: MirroredDevice) -> int:
    return device.free_instance_mib // device.unit_mib


def _instance_percent(device: MirroredDevice) -> int:
    """Return the largest percentage of the device's memory for which an instance is free."""
    units = device.total_mib // device.unit_mib
    return min(99, (100 * (_instance_units(device) + 1) - 1) // units)


_INSTANCE_HEADROOM: Mapping[str, Callable[[MirroredDevice], int]] = {
    UNITS: _instance_units,
    MIBS: lambda device: device.free_instance_mib,
    PERCENT: _instance_percent,
    WHOLE: lambda device: int(device.free_instance_mib >= device.largest_instance_mib),
}


def has_headroom(rank: Rank, need: int, *, packs: bool) -> bool:
    """Return whether a rank stands for a headroom of `need` or more."""
    if packs:
        return rank >> FULLNESS_BITS >= need
    return MAX_HEADROOM - (rank & MAX_HEADROOM) >= need


def next_rank_with_headroom(rank: Rank, need: int, *, packs: bool) -> Rank:
    """Return the lowest rank after `rank` that may have the headroom, if `rank` has not."""
    return need << FULLNESS_BITS if packs else ((rank >> HEADROOM_BITS) + 1) << HEADROOM_BITS
