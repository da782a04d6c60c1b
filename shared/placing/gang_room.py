"""Few leases whose end lets the pods of a gang start together; pure.

The lowest tier that suffices is found first. Up to it, leases end in the order of how many it takes
for a pod; then unneeded ones are spared. A smallest set would take too long to find.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from shared.model.devices.replicas import is_replica
from shared.model.leases.lease import Share
from shared.model.leases.ledger import NodeTotals
from shared.model.names import NodeName, PodUid
from shared.model.requests.placement import Placement
from shared.model.requests.request import PodRequest
from shared.placing.endable_leases import (
    Cost,
    EndableLease,
    Endables,
    EndingGangs,
    cost_of,
    needs_others,
)
from shared.placing.index.no_fit import NoFit
from shared.placing.index.node_index import placement_key
from shared.placing.room import Allows, without
from shared.placing.trial_cluster import TrialCluster

MAX_TRIALS = 20_000
MOST_SPARED = 16
MOST_TIERS = 8
"""Tiers that are tried, from the lowest that suffices if all up to it end."""
SHARES_OF_DEVICE = 16
"""How many pods are assumed to fit on a device before they are counted."""
Placed = dict[int, Placement]
"""By the request's number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GangRoom:
    placements: tuple[Placement | None, ...]
    """None for a pod that does not start with the others."""
    ends: Endables

    @property
    def cost(self) -> Cost:
        return cost_of(self.ends)


@dataclass(frozen=True, slots=True)
class _Choice:
    """`ends` can end together, which makes room for at most `gain` pods."""

    ends: Endables
    gain: int
    node: NodeName | None = None
    """Several leases of this node are looked for; None if `ends` is what ends."""
    counted_at: int = -1
    """`gain` is exact while so many choices are taken."""

    @property
    def key(self) -> tuple[float, bool, tuple[int, ...], float]:
        """What needs the fewest leases for each pod comes first."""
        if not self.ends:
            return (1.0, True, (), 0.0)
        return (
            len(self.ends) / self.gain,
            self.node is not None,
            max([end.tier for end in self.ends]),
            sum([end.used_gpu_s for end in self.ends]) / self.gain,
        )


@dataclass(eq=False)
class _EndedLeases:
    nodes: dict[NodeName, NodeTotals]
    ended: dict[NodeName, set[PodUid]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cluster = TrialCluster([totals.node for totals in self.nodes.values()])

    def end(self, ends: Iterable[EndableLease]) -> list[NodeName]:
        """Return the nodes that changed."""
        changed = dict[NodeName, None]()
        for end in ends:
            if end.lease.node not in self.nodes:
                continue
            self.ended.setdefault(end.lease.node, set()).add(end.lease.pod)
            changed[end.lease.node] = None
        self._put(changed)
        return list(changed)

    def undo(self, ends: Iterable[EndableLease]) -> None:
        changed = dict[NodeName, None]()
        for end in ends:
            if end.lease.node in self.nodes:
                self.ended[end.lease.node].discard(end.lease.pod)
                changed[end.lease.node] = None
        self._put(changed)

    def _put(self, names: Iterable[NodeName]) -> None:
        for name in names:
            self.cluster.put_node(without(self.nodes[name], self.ended[name]).node)

    def place_all(self, requests: Sequence[PodRequest], needed: int) -> Placed:
        placed: Placed = {}
        refused: PodRequest | None = None
        for number, request in enumerate(requests):
            if len(placed) == needed:
                break
            if request == refused:
                continue
            result = self.cluster.place(PodUid(str(number)), request)
            if isinstance(result, NoFit):
                refused = request
            else:
                placed[number] = result
        return placed

    def place(self, request: PodRequest, numbers: Iterable[int]) -> Placed:
        placed: Placed = {}
        for number in numbers:
            result = self.cluster.place(PodUid(str(number)), request)
            if isinstance(result, NoFit):
                break
            placed[number] = result
        return placed

    def remove(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.cluster.remove(PodUid(str(number)))

    def place_on(
        self, names: Iterable[NodeName], request: PodRequest, numbers: Sequence[int]
    ) -> Placed:
        placed: Placed = {}
        left = list(reversed(numbers))
        for name in names:
            while left:
                placement = self.cluster.place_on(name, PodUid(str(left[-1])), request)
                if placement is None:
                    break
                placed[left.pop()] = placement
        return placed


class GangRoomSearch:
    def __init__(
        self,
        requests: Sequence[PodRequest],
        needed: int,
        nodes: Iterable[NodeTotals],
        gangs: EndingGangs,
        allows: Allows,
    ) -> None:
        self._requests = requests
        self._needed = needed
        self._trial = _EndedLeases({totals.node.facts.name: totals for totals in nodes})
        self._gangs = gangs
        self._allows = allows
        self._left = MAX_TRIALS
        self._taken = list[Endables]()
        self._ended = set[PodUid]()
        self._placed: Placed = {}
        self._has_more = False

    def fits(self) -> bool:
        return self._fits_without(())

    def room(self, candidates: Iterable[EndableLease]) -> GangRoom | None:
        among = []
        for endable in candidates:
            whole = self._gangs.whole((endable,))
            is_here = endable.lease.node in self._trial.nodes
            if is_here and whole is not None and self._allows(whole):
                among.append(endable)
        among.sort(key=lambda endable: (endable.tier, endable.used_gpu_s, endable.lease.pod))
        if not among or not self._fits_without(among):
            return None
        tiers = sorted({endable.tier for endable in among})
        lowest = bisect_left(
            tiers[:-1],
            True,
            key=lambda tier: self._fits_without([end for end in among if end.tier <= tier]),
        )
        # Not all up to a tier may end together: then some of the next ones end, too.
        for tier in tiers[lowest : lowest + MOST_TIERS]:
            room = self._chosen([endable for endable in among if endable.tier <= tier])
            if room is not None:
                return room
        return None

    def _fits_without(self, ends: Sequence[EndableLease]) -> bool:
        return len(self._placed_without(ends)) == self._needed

    def _placed_without(self, ends: Sequence[EndableLease]) -> Placed:
        self._trial.end(ends)
        placed = self._trial.place_all(self._requests, self._needed)
        self._trial.remove(placed)
        self._trial.undo(ends)
        return placed

    def _chosen(self, among: Sequence[EndableLease]) -> GangRoom | None:
        self._taken = []
        self._ended = set()
        self._has_more = False
        self._placed = self._trial.place_all(self._requests, self._needed)
        kinds = dict[Hashable, list[int]]()
        for number, request in enumerate(self._requests):
            if number not in self._placed:
                kinds.setdefault(placement_key(request), []).append(number)
        for numbers in kinds.values():
            # What ended for other pods may leave room for these.
            wanted = numbers[: self._needed - len(self._placed)]
            self._placed.update(self._trial.place(self._requests[numbers[0]], wanted))
            self._choose(numbers, among)
        self._trial.remove(self._placed)
        for ends in self._taken:
            self._trial.undo(ends)
        if len(self._placed) < self._needed:
            return None
        taken, placed = self._spared()
        ends = tuple([end for group in taken for end in group])
        placements = tuple([placed.get(number) for number in range(len(self._requests))])
        return GangRoom(placements=placements, ends=ends)

    def _choose(self, numbers: Sequence[int], among: Sequence[EndableLease]) -> None:
        request = self._requests[numbers[0]]
        heap = list[tuple[tuple[float, bool, tuple[int, ...], float], int, _Choice]]()
        for choice in self._choices(request, among):
            heap.append((choice.key, len(heap), choice))
        heapify(heap)
        while heap and self._left > 0:
            left = [number for number in numbers if number not in self._placed]
            left = left[: self._needed - len(self._placed)]
            if not left:
                break
            _, order, choice = heappop(heap)
            if choice.counted_at != len(self._taken):
                further = self._counted(choice, request, left, among)
            elif self._allows([end for group in (*self._taken, choice.ends) for end in group]):
                self._take(choice, request, left)
                further = None if choice.node is None else _Choice((), 1, choice.node)
            else:
                further = None
            if further is not None:
                heappush(heap, (further.key, order, further))

    def _choices(self, request: PodRequest, among: Sequence[EndableLease]) -> list[_Choice]:
        choices = list[_Choice]()
        gangs = set[frozenset[PodUid]]()
        on_nodes = Counter[NodeName]()
        for endable in among:
            whole = self._gangs.whole((endable,))
            if whole is None:
                continue
            on_nodes[endable.lease.node] += 1
            if len(whole) > 1:
                pods = frozenset([end.lease.pod for end in whole])
                if pods in gangs:
                    continue
                gangs.add(pods)
            choices.append(_Choice(whole, _most_gained(whole, request)))
        return choices + [_Choice((), 1, node) for node, count in on_nodes.items() if count > 1]

    def _counted(
        self,
        choice: _Choice,
        request: PodRequest,
        left: Sequence[int],
        among: Sequence[EndableLease],
    ) -> _Choice | None:
        if choice.node is None:
            ends = self._whole_of(choice.ends)
        else:
            ends = self._several_on(choice.node, request, left, among)
        gain = self._gain_of(ends, request, left)
        return _Choice(ends, gain, choice.node, len(self._taken)) if gain else None

    def _whole_of(self, ends: Endables) -> Endables:
        """Return what ends with these and has not ended yet, or () if that may not be."""
        if any(needs_others(end.lease) for end in ends):
            taken = tuple([end for group in self._taken for end in group])
            pods = {end.lease.pod for end in taken}
            whole = self._gangs.whole((*taken, *[end for end in ends if end.lease.pod not in pods]))
            return tuple([end for end in whole or () if end.lease.pod not in pods])
        return tuple([end for end in ends if end.lease.pod not in self._ended])

    def _several_on(
        self,
        node: NodeName,
        request: PodRequest,
        left: Sequence[int],
        among: Sequence[EndableLease],
    ) -> Endables:
        """Return leases of a node that make room together, without those that can be spared."""
        ends = [end for end in among if end.lease.node == node]
        ends = [end for end in ends if end.lease.pod not in self._ended]
        if not self._gain_of(self._whole_of(tuple(ends)), request, left[:1]):
            return ()
        for endable in list(reversed(ends)):
            fewer = tuple([end for end in ends if end is not endable])
            if self._gain_of(self._whole_of(fewer), request, left[:1]):
                ends = list(fewer)
        return self._whole_of(tuple(ends))

    def _gain_of(self, ends: Endables, request: PodRequest, left: Sequence[int]) -> int:
        if not ends or self._left <= 0:
            return 0
        self._left -= 1
        gained = self._trial.place_on(self._trial.end(ends), request, left)
        self._trial.remove(gained)
        self._trial.undo(ends)
        return len(gained)

    def _take(self, choice: _Choice, request: PodRequest, left: Sequence[int]) -> None:
        names = self._trial.end(choice.ends)
        self._placed.update(self._trial.place_on(names, request, left))
        self._taken.append(choice.ends)
        self._ended.update([end.lease.pod for end in choice.ends])
        self._has_more = bool(self._trial.place_on(names, request, [len(self._requests)]))
        self._trial.remove([len(self._requests)])

    def _spared(self) -> tuple[list[Endables], Placed]:
        taken = list(self._taken)
        placed = self._placed
        if not self._has_more:
            return taken, placed
        for ends in sorted(taken, key=len, reverse=True)[:MOST_SPARED]:
            fewer = [group for group in taken if group is not ends]
            left = tuple([end for group in fewer for end in group])
            whole = self._gangs.whole(left)
            if not left or whole is None or len(whole) > len(left):
                continue
            without_it = self._placed_without(left)
            if len(without_it) == self._needed:
                taken = fewer
                placed = without_it
        return taken, placed


def _most_gained(ends: Endables, request: PodRequest) -> int:
    devices = {share.device: share for end in ends for share in end.lease.shares}
    places = sum([_most_on(share, request) for share in devices.values()])
    wanted = sum([container.gpus for container in request.containers if not container.init])
    return max(1, -(-places // max(1, wanted)))


def _most_on(share: Share, request: PodRequest) -> int:
    most = SHARES_OF_DEVICE
    for container in request.containers:
        mib = 0
        if container.whole or container.wants_all_memory:
            mib = share.memory_mib if is_replica(share.mode) else share.device_mib
        elif container.memory_percent is not None:
            mib = share.device_mib * container.memory_percent // 100
        elif container.memory_units is not None:
            mib = container.memory_units * share.unit_mib
        if not container.init and mib:
            most = min(most, max(1, share.device_mib // mib))
        if not container.init and container.cores_percent:
            most = min(most, max(1, 100 // container.cores_percent))
    return most
