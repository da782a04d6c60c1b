"""Ranks of nodes: one number per node and kind of request, for how well the node fits; pure.

A node's *headroom* for n shares is the most that each of them can get at once: the n-th largest of
its devices' free memory. A *rank* packs the headroom with how full the node is. The order of ranks
is the order of preference: for BINPACK the smallest headroom first and then the fullest node; for
SPREAD the emptiest node first and then the largest headroom.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from shared.model.device import IDLE_BEFORE, MIB, DeviceMode
from shared.model.quantity import peak
from shared.model.request import GpuRequest, NodeOrder, PodRequest
from shared.placing.choice.container_choice import required_free_cores
from shared.placing.mirror.node_mirror import MirroredDevice, MirroredNode

FULLNESS_BITS: Final = 6
MAX_FULLNESS: Final = (1 << FULLNESS_BITS) - 1
HEADROOM_BITS: Final = 40
MAX_HEADROOM: Final = (1 << HEADROOM_BITS) - 1
Rank = int
NO_RANK: Final = -1

UNITS, MIBS, PERCENT, WHOLE, NONE = "units", "mib", "percent", "whole", "none"
FREEST = "freest"
"""The unit of the headroom: that of the request. WHOLE: 1 if all units are free, else 0. Where no
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
        need = peak(((c.memory_units or 0, c.init) for c in containers), 0)
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


def ranking_for(kind: RequestKind) -> "Ranking":
    """Return the ranking for one kind."""
    if kind.measure == NONE:
        return Ranking(kind)
    if kind.measure == FREEST:
        return _FreestRanking(kind)
    if not kind.gpus:
        return _AnyNodeRanking(kind)
    rankings = _INSTANCE_RANKINGS if kind.instances else _SHARE_RANKINGS
    return rankings[kind.measure](kind)


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


class Ranking:
    """Ranks nodes for one kind of request; this one for pods that request no device."""

    def __init__(self, kind: RequestKind) -> None:
        self.packs = kind.packs
        self.in_units = kind.measure == UNITS
        self.nth = kind.gpus
        self.cores = kind.cores
        self.idle = kind.idle
        self.slotted = kind.slotted

    def rank(self, node: MirroredNode) -> Rank:
        """Return the rank of a node; NO_RANK where the kind cannot fit."""
        free = self.headroom(node)
        if free < 0:
            return NO_RANK
        if self.packs:
            return free << FULLNESS_BITS | MAX_FULLNESS - fullness(node)
        return fullness(node) << HEADROOM_BITS | MAX_HEADROOM - free

    def headroom(self, node: MirroredNode) -> int:
        """Return the headroom of a node; -1: it has too few devices."""
        return len(node.devices)


class _FreestRanking(Ranking):
    def headroom(self, node: MirroredNode) -> int:
        return max([device.free_units for device in node.devices], default=0)


class _AnyNodeRanking(Ranking):
    def headroom(self, node: MirroredNode) -> int:
        return 0


class _DeviceRanking(Ranking):
    """By the n-th largest amount that the devices have free; this one by units of memory."""

    def headroom(self, node: MirroredNode) -> int:
        if not self.in_units or self.idle or self.nth > 2:
            return _nth_largest(self._amounts(node), self.nth)
        cores, slotted = self.cores, self.slotted
        first = second = -1
        for device in node.shareable_devices:
            if (device.free_slot_cores if slotted else device.free_cores) < cores:
                continue
            amount = device.free_units
            if amount > first:
                first, second = amount, first
            elif amount > second:
                second = amount
        return first if self.nth == 1 else second

    def _amounts(self, node: MirroredNode) -> list[int]:
        cores, idle, slotted = self.cores, self.idle, self.slotted
        return [
            self.amount(device)
            for device in (node.devices if idle else node.shareable_devices)
            if (device.free_slot_cores if slotted else device.free_cores) >= cores
            and not (idle and device.shares)
        ]

    def amount(self, device: MirroredDevice) -> int:
        """Return what a device has free."""
        return device.free_units


class _MibRanking(_DeviceRanking):
    def amount(self, device: MirroredDevice) -> int:
        return device.total_mib - device.used_mib


class _PercentRanking(_DeviceRanking):
    def amount(self, device: MirroredDevice) -> int:
        """Return the largest percentage whose share, rounded down to units, is free."""
        units, free = device.total_mib // device.unit_mib, device.free_units
        return 100 if free >= units else (100 * (free + 1) - 1) // units


class _WholeRanking(_DeviceRanking):
    def amount(self, device: MirroredDevice) -> int:
        return int(device.total_mib - device.used_mib >= device.whole_units_mib)


_SHARE_RANKINGS: Mapping[str, type[Ranking]] = {
    UNITS: _DeviceRanking,
    MIBS: _MibRanking,
    PERCENT: _PercentRanking,
    WHOLE: _WholeRanking,
}


class _InstanceRanking(Ranking):
    """By the n-th largest of the free MIG instances; this one by their MiB."""

    def headroom(self, node: MirroredNode) -> int:
        amounts = [self.amount(device) for device in node.devices if device.free_instance_mib]
        return _nth_largest(amounts, self.nth)

    def amount(self, device: MirroredDevice) -> int:
        """Return the size of the largest free instance of a device."""
        return device.free_instance_mib


class _InstanceUnitsRanking(_InstanceRanking):
    def amount(self, device: MirroredDevice) -> int:
        return device.free_instance_mib // device.unit_mib


class _InstancePercentRanking(_InstanceRanking):
    def amount(self, device: MirroredDevice) -> int:
        """Return the largest percentage of the device's memory for which an instance is free."""
        units = device.total_mib // device.unit_mib
        return min(99, (100 * (device.free_instance_mib // device.unit_mib + 1) - 1) // units)


class _LargestInstanceRanking(_InstanceRanking):
    def amount(self, device: MirroredDevice) -> int:
        return int(device.free_instance_mib >= device.largest_instance_mib)


_INSTANCE_RANKINGS: Mapping[str, type[Ranking]] = {
    UNITS: _InstanceUnitsRanking,
    MIBS: _InstanceRanking,
    PERCENT: _InstancePercentRanking,
    WHOLE: _LargestInstanceRanking,
}


def _nth_largest(amounts: list[int], nth: int) -> int:
    amounts.sort()
    return amounts[-nth] if len(amounts) >= nth else -1


def has_headroom(rank: Rank, need: int, *, packs: bool) -> bool:
    """Return whether a rank stands for a headroom of `need` or more."""
    if packs:
        return rank >> FULLNESS_BITS >= need
    return MAX_HEADROOM - (rank & MAX_HEADROOM) >= need


def next_rank_with_headroom(rank: Rank, need: int, *, packs: bool) -> Rank:
    """Return the lowest rank after `rank` that may have the headroom, if `rank` has not."""
    return need << FULLNESS_BITS if packs else ((rank >> HEADROOM_BITS) + 1) << HEADROOM_BITS
