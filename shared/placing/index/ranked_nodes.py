"""Nodes sorted by rank, following the mirror's changes; pure.

A node's *headroom* for n shares is the most that each can get at once: the n-th largest of its
devices' free memory. A *rank* packs the headroom with how full the node is. Lower ranks are
preferred: BINPACK wants the smallest headroom, then the fullest node; SPREAD the emptiest node,
then the largest headroom.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from heapq import nsmallest
from itertools import chain, islice
from typing import Final, NamedTuple

from shared.model.bounds import BILLION
from shared.model.devices.device import IDLE_BEFORE, MIB, DeviceMode
from shared.model.quantity import peak
from shared.model.requests.request import ALL_PERCENT, GpuRequest, NodeOrder, PodRequest
from shared.placing.choice.container_choice import required_free_cores
from shared.placing.choice.device_choice import allowed_modes, device_chooser
from shared.placing.mirror.cluster_mirror import ChangeReader, ClusterMirror
from shared.placing.mirror.node_mirror import MirroredDevice, MirroredNode

FULLNESS_BITS: Final = 6
MAX_FULLNESS: Final = (1 << FULLNESS_BITS) - 1
HEADROOM_BITS: Final = 40
MAX_HEADROOM: Final = (1 << HEADROOM_BITS) - 1
Rank = int
NO_RANK: Final = -1
CACHED_RANKINGS: Final = 256
CACHED_KINDS: Final = 64

UNITS = "units"
MIBS = "mib"
PERCENT = "percent"
WHOLE = "whole"
REPLICAS = "replicas"
NONE = "none"
FREEST = "freest"
"""Units of the headroom. WHOLE is 1 if all units are free, else 0. REPLICAS counts free replicas.
Without a requested device, NONE counts devices, and FREEST the units that the freest device has
free.
"""


class RequestKind(NamedTuple):
    """What requests that share ranked nodes have in common; a filter that is never too strict."""

    measure: str
    gpus: int
    cores: int
    """As `required_free_cores`."""
    idle: bool
    slotted: bool
    packs: bool
    """False for SPREAD."""
    instances: bool = False
    """The headroom is the largest free instance of devices in MIG mode; else of other devices."""


def request_kind(
    request: PodRequest, mode: DeviceMode = DeviceMode.HAMI_CORE
) -> tuple[RequestKind, int]:
    """The most demanding container stands for all; the exact choice decides about the others."""
    packs = request.node_order is not NodeOrder.SPREAD
    containers = request.containers
    if not containers:
        return RequestKind(
            FREEST if request.node_order.compares else NONE, 0, 0, False, False, packs
        ), 0
    lead = containers[0] if len(containers) == 1 else max(containers, key=_demand)
    measure, need = _need(lead)
    if mode is DeviceMode.MIG:
        if lead.wants_all_memory:
            measure = WHOLE
            need = 1
        return RequestKind(measure, lead.gpus, 0, False, False, packs, instances=True), need
    if mode is DeviceMode.REPLICAS:
        return RequestKind(REPLICAS, lead.gpus, 0, False, False, packs), 1
    if request.same_device and measure == UNITS:
        need = peak(((c.memory_units or 0, c.init) for c in containers), 0)
    idle = lead.sharing in IDLE_BEFORE
    slotted = lead.slotted and not lead.slots
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
        if container.memory_billionths:
            return PERCENT, ALL_PERCENT * container.memory_billionths // BILLION
        if container.memory_percent is not None:
            return PERCENT, container.memory_percent
        if container.memory_bytes is not None:
            return MIBS, -(-container.memory_bytes // MIB)
        if container.memory_units is not None:
            return UNITS, container.memory_units
    return WHOLE, 1


class PlannedKind:
    __slots__ = ("kind", "likely", "need")

    def __init__(self, kind: RequestKind, need: int) -> None:
        self.kind = _one_object(kind)
        self.likely = self.kind
        if kind.cores not in {0, 1, 100}:
            self.likely = _one_object(kind._replace(cores=1))
        """The kind that leaves the percentage of cores out: see `NodeIndex.likely_nodes`."""
        self.need = need


@lru_cache(CACHED_KINDS)
def _one_object(kind: RequestKind) -> RequestKind:
    """Dictionaries find the same object without comparing its fields."""
    return kind


class RequestPlan:
    __slots__ = ("choose", "kinds", "refused", "share_kinds")

    def __init__(self, request: PodRequest) -> None:
        modes = allowed_modes(request)
        self.kinds = [PlannedKind(*request_kind(request, mode)) for mode in modes]
        self.share_kinds = [
            kind
            for kind, mode in zip(self.kinds, modes, strict=True)
            if mode is DeviceMode.HAMI_CORE
        ]
        self.choose = device_chooser(request)
        self.refused = False
        """No node fitted the last request: likely ones are not tried before the next is decided."""


def fullness(node: MirroredNode) -> int:
    """Return 0 (idle) to 63, by the devices or else by cpu."""
    if node.devices:
        if not node.shares or not node.total_mib:
            return 0
        full = 1 + 62 * node.used_mib // node.total_mib
        return min(MAX_FULLNESS, full)
    total = node.facts.allocatable.get("cpu", 0)
    used = total - node.free_resources.get("cpu", 0)
    return min(MAX_FULLNESS, 1 + 62 * used // total) if used > 0 and total > 0 else 0


Amount = Callable[[MirroredDevice], int]


def _free_mib(device: MirroredDevice) -> int:
    return device.total_mib - device.used_mib


def _free_percent(device: MirroredDevice) -> int:
    """Shares are rounded down to units."""
    units = device.total_mib // device.unit_mib
    free = device.free_units
    return 100 if free >= units else (100 * (free + 1) - 1) // units


def _instance_percent(device: MirroredDevice) -> int:
    units = device.total_mib // device.unit_mib
    return min(99, (100 * (device.free_instance_mib // device.unit_mib + 1) - 1) // units)


def _free_of(kind: RequestKind) -> Amount:
    amounts: Mapping[tuple[str, bool], Amount] = {
        (UNITS, False): lambda device: device.free_units,
        (MIBS, False): _free_mib,
        (PERCENT, False): _free_percent,
        (WHOLE, False): lambda device: int(_free_mib(device) >= device.whole_units_mib),
        (UNITS, True): lambda device: device.free_instance_mib // device.unit_mib,
        (MIBS, True): lambda device: device.free_instance_mib,
        (PERCENT, True): _instance_percent,
        (WHOLE, True): lambda device: int(device.free_instance_mib >= device.largest_instance_mib),
    }
    return amounts.get((kind.measure, kind.instances), _free_mib)


class Ranking:
    def __init__(self, kind: RequestKind) -> None:
        self.packs = kind.packs
        self.measure = kind.measure
        self.nth = kind.gpus
        self.cores = kind.cores
        self.idle = kind.idle
        self.slotted = kind.slotted
        self.instances = kind.instances
        self.common = (
            kind.measure == UNITS and not (kind.instances or kind.idle) and kind.gpus in {1, 2}
        )
        self.free = _free_of(kind)

    def rank(self, node: MirroredNode) -> Rank:
        free = self.headroom(node)
        if free < 0:
            return NO_RANK
        if self.packs:
            return free << FULLNESS_BITS | MAX_FULLNESS - fullness(node)
        return fullness(node) << HEADROOM_BITS | MAX_HEADROOM - free

    def headroom(self, node: MirroredNode) -> int:
        """Return -1 if the node has too few devices."""
        if not self.common:
            return self._other_headroom(node)
        cores = self.cores
        slotted = self.slotted
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

    def _other_headroom(self, node: MirroredNode) -> int:
        if self.measure == NONE:
            return len(node.devices)
        if self.measure == FREEST:
            return max([device.free_units for device in node.devices], default=0)
        if not self.nth:
            return 0
        free = self.free
        cores = self.cores
        idle = self.idle
        slotted = self.slotted
        if self.measure == REPLICAS:
            amounts = [device.free_replicas for device in node.devices if device.free_replicas]
        elif self.instances:
            amounts = [free(device) for device in node.devices if device.free_instance_mib]
        else:
            amounts = [
                free(device)
                for device in (node.devices if idle else node.shareable_devices)
                if (device.free_slot_cores if slotted else device.free_cores) >= cores
                and not (idle and device.shares)
            ]
        amounts.sort()
        return amounts[-self.nth] if len(amounts) >= self.nth else -1


@lru_cache(CACHED_RANKINGS)
def ranking_for(kind: RequestKind) -> Ranking:
    return Ranking(kind)


def has_headroom(rank: Rank, need: int, *, packs: bool) -> bool:
    if packs:
        return rank >> FULLNESS_BITS >= need
    return MAX_HEADROOM - (rank & MAX_HEADROOM) >= need


def next_rank_with_headroom(rank: Rank, need: int, *, packs: bool) -> Rank:
    """Return the lowest rank after `rank` that may have the headroom, if `rank` has not."""
    return need << FULLNESS_BITS if packs else ((rank >> HEADROOM_BITS) + 1) << HEADROOM_BITS


TIE_NODES: Final = 64
"""The first choice is random among so many nodes, and at most one in `TIE_SHARE` of all."""
TIE_SHARE: Final = 16
BEST_GROUPS: Final = 8
UNCONTESTED_NODES: Final = 4
RECENT_CHANGES: Final = 64
"""Changes of the ledger for which a node counts as just used."""
SEARCHED_NODES: Final = 256
CANDIDATES: Final = 3
LAST_RANK: Rank = 1 << 62


class BestNodes:
    __slots__ = ("ends", "groups", "tied", "total")

    def __init__(self) -> None:
        self.groups: list[list[MirroredNode]] = []
        self.ends: list[int] = []
        self.tied = 0
        """How many nodes, from the first on, tie: the first choice is random among them."""
        self.total = 0

    def node(self, position: int) -> MirroredNode:
        ends = self.ends
        at = bisect_right(ends, position)
        return self.groups[at][position - ends[at]]


class NodePlace:
    __slots__ = ("changes", "position", "rank")

    def __init__(self) -> None:
        self.changes = -1
        """`MirroredNode.changes` when its rank was determined."""
        self.rank = NO_RANK
        self.position = 0


class RankedNodes:
    def __init__(self, mirror: ClusterMirror, ranking: Ranking) -> None:
        self.mirror = mirror
        self.ranking = ranking
        self.packs = ranking.packs
        self.ranks: list[Rank] = []
        self.groups: dict[Rank, list[MirroredNode]] = {}
        self._places: dict[MirroredNode, NodePlace] = {}
        self._changes = ChangeReader(mirror.changes)
        self._uncontested: dict[int, tuple[Sequence[MirroredNode], Sequence[MirroredNode]]] = {}
        """By headroom, used and idle nodes that others have not just used."""
        self._uncontested_at = -1

    def catch_up(self) -> None:
        changed = self._changes.read()
        if changed is None:
            self.ranks.clear()
            self.groups.clear()
            self._places.clear()
            changed = list(self.mirror.nodes.values())
        for node in changed:
            self.update(node)

    def update(self, node: MirroredNode) -> None:
        place = self._places.get(node)
        if place is None:
            place = self._places[node] = NodePlace()
        elif place.changes == node.changes:
            return
        place.changes = node.changes
        rank = NO_RANK if node.removed else self.ranking.rank(node)
        last_rank = place.rank
        if rank != last_rank:
            if last_rank != NO_RANK:
                self._leave(node, place)
            if rank != NO_RANK:
                self._join(node, place, rank)
        if node.removed:
            del self._places[node]

    def _leave(self, node: MirroredNode, place: NodePlace) -> None:
        rank = place.rank
        place.rank = NO_RANK
        group = self.groups[rank]
        last = group.pop()
        if last is not node:
            position = place.position
            group[position] = last
            self._places[last].position = position
        elif not group:
            del self.groups[rank]
            del self.ranks[bisect_left(self.ranks, rank)]

    def _join(self, node: MirroredNode, place: NodePlace, rank: Rank) -> None:
        group = self.groups.get(rank)
        if group is None:
            group = self.groups[rank] = []
            insort(self.ranks, rank)
        place.rank = rank
        place.position = len(group)
        group.append(node)

    def ranks_with_headroom(self, need: int) -> Iterator[Rank]:
        ranks = self.ranks
        packs = self.packs
        at = self._start(need)
        while at < len(ranks):
            rank = ranks[at]
            if packs or has_headroom(rank, need, packs=packs):
                yield rank
                at += 1
            else:
                at = bisect_left(ranks, next_rank_with_headroom(rank, need, packs=packs), at + 1)

    def best_nodes(
        self, need: int, accepts: Callable[[MirroredNode], bool] | None = None
    ) -> BestNodes:
        """Return at least one node with the headroom, if any exists.

        With `accepts`, up to `TIE_NODES` of each rank count.
        """
        groups = self.groups
        if accepts is not None:
            accepted: dict[Rank, list[MirroredNode]] = {}
            ranks = self._ranks_accepted(need, accepts, accepted)
            return self._best(islice(ranks, BEST_GROUPS), accepted)
        if self.packs:
            start = self._start(need)
            return self._best(self.ranks[start : start + BEST_GROUPS], groups)
        return self._best(islice(self.ranks_with_headroom(need), BEST_GROUPS), groups)

    def random_best(self, need: int, rng: Callable[[], float]) -> MirroredNode | None:
        ranks = self.ranks
        packs = self.packs
        at = self._start(need)
        end = len(ranks)
        while not packs and at < end and not has_headroom(ranks[at], need, packs=False):
            after = next_rank_with_headroom(ranks[at], need, packs=False)
            at = bisect_left(ranks, after, at + 1)
        if at >= end:
            return None
        best = ranks[at]
        limit = min(BEST_GROUPS, end - at)
        limit = min(limit, max(1, len(self.mirror.nodes) // TIE_SHARE))
        rank = ranks[at + int(rng() * limit)]
        if rank != best and not (
            _level(rank, packs=packs) == _level(best, packs=packs)
            and (packs or has_headroom(rank, need, packs=False))
        ):
            rank = best
        group = self.groups[rank]
        return group[int(rng() * len(group))]

    def _ranks_accepted(
        self,
        need: int,
        accepts: Callable[[MirroredNode], bool],
        groups: dict[Rank, list[MirroredNode]],
    ) -> Iterator[Rank]:
        for rank in self.ranks_with_headroom(need):
            nodes = list(islice(filter(accepts, self.groups[rank]), TIE_NODES))
            if nodes:
                groups[rank] = nodes
                yield rank

    def best_of(self, nodes: Iterable[MirroredNode], need: int) -> BestNodes:
        groups: dict[Rank, list[MirroredNode]] = {}
        for node in nodes:
            rank = self._rank(node)
            if rank != NO_RANK and has_headroom(rank, need, packs=self.packs):
                groups.setdefault(rank, []).append(node)
        return self._best(nsmallest(BEST_GROUPS, groups), groups)

    def _best(self, ranks: Iterable[Rank], groups: Mapping[Rank, list[MirroredNode]]) -> BestNodes:
        """Return groups in order of rank, and how many nodes tie.

        BINPACK uses no idle node while a used one fits; SPREAD stays within a level of fullness.
        """
        best = BestNodes()
        packs = self.packs
        limit = max(1, min(TIE_NODES, len(self.mirror.nodes) // TIE_SHARE))
        enough = max(limit, CANDIDATES)
        first = -1
        total = 0
        tied = 0
        best_groups = best.groups
        ends = best.ends
        for rank in ranks:
            group = groups[rank]
            level = _level(rank, packs=packs)
            if first < 0:
                first = level
            if level == first and tied == total and total < limit:
                tied += len(group)
            total += len(group)
            best_groups.append(group)
            ends.append(total)
            if total >= enough:
                break
        best.tied = tied
        best.total = total
        return best

    def rank_of(self, node: MirroredNode) -> Rank:
        """A node without a rank comes last."""
        rank = self._rank(node)
        return LAST_RANK if rank == NO_RANK else rank

    def _rank(self, node: MirroredNode) -> Rank:
        place = self._places.get(node)
        return NO_RANK if place is None else place.rank

    def in_order(self, need: int) -> Iterator[MirroredNode]:
        for rank in self.ranks_with_headroom(need):
            yield from self.groups[rank]

    def uncontested_nodes(self, need: int, rng: Callable[[], float]) -> Iterator[MirroredNode]:
        """Yield the best nodes for BINPACK that others have not just used.

        First come used ones in random order, then as many idle ones. They stay the same until the
        ledger changes, so that batches of different placers use different nodes.
        """
        if self._uncontested_at != self.mirror.applied_changes:
            self._uncontested_at = self.mirror.applied_changes
            self._uncontested.clear()
        cached, idle = self._uncontested.get(need, ((), ()))
        used = [node for node in cached if has_headroom(self._rank(node), need, packs=True)]
        if not used:
            used, idle = self._find_uncontested(need, rng)
            self._uncontested[need] = (used, idle)
        first = int(rng() * len(used))
        yield from chain(used[first:], used[:first], idle)

    def _find_uncontested(
        self, need: int, rng: Callable[[], float]
    ) -> tuple[list[MirroredNode], list[MirroredNode]]:
        """Return used nodes, best first, and idle ones if those are too few."""
        used: list[MirroredNode] = []
        idle: list[MirroredNode] = []
        since = self.mirror.applied_changes - RECENT_CHANGES
        left = SEARCHED_NODES
        for rank in self.ranks_with_headroom(need):
            chosen = idle if rank & MAX_FULLNESS == MAX_FULLNESS else used
            group = self.groups[rank]
            start = int(rng() * len(group))
            for node in islice(chain(group[start:], group[:start]), left):
                if node.changed_by_others < since:
                    chosen.append(node)
                    if len(chosen) == UNCONTESTED_NODES:
                        return used, idle
            left -= len(group)
            if left <= 0:
                break
        return used, idle

    def random_nodes(
        self, need: int, count: int, rng: Callable[[], float]
    ) -> Iterator[MirroredNode]:
        start = self._start(need)
        ranks = self.ranks
        groups = self.groups
        fitting = len(ranks) - start
        for _ in range(count if fitting else 0):
            group = groups[ranks[start + int(rng() * fitting)]]
            yield group[int(rng() * len(group))]

    def _start(self, need: int) -> int:
        if not self.packs:
            return 0
        return bisect_left(self.ranks, next_rank_with_headroom(0, need, packs=True))


def _level(rank: Rank, *, packs: bool) -> int:
    """For BINPACK 1 if idle, else 0; for SPREAD the fullness."""
    return rank & MAX_FULLNESS == MAX_FULLNESS if packs else rank >> HEADROOM_BITS
