"""The cheapest sets of leases whose end lets a pod run on one node; pure.

A set costs its most undesirable lease first (`EndableLease.tier`), then their number, then the
GPU-seconds they used. For few leases, the order is exact. On a node with too many sets, leases are
spared one by one, the most expensive first.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice

from msgspec import structs

from shared.model.devices.device import DeviceUse
from shared.model.leases.lease import Lease
from shared.model.leases.ledger import NodeTotals, counted_use, with_changes
from shared.model.names import DeviceUuid, NodeName, PodUid
from shared.model.requests.placement import Placement
from shared.model.requests.request import PodRequest
from shared.placing.endable_leases import (
    EndableLease,
    Endables,
    EndingGangs,
    cost_of,
    gpus_by_lease,
    needs_others,
    used_gpu_s,
)
from shared.placing.trial_cluster import TrialCluster

MAX_TRIALS = 6000
"""For one pod; a quarter of these for the sets of leases of one node."""
FEW_LEASES = 4
MAX_TRIALS_WITH_FEW_LEASES = 20_000
EndsFor = tuple[NodeName, Endables]
"""Whole gangs end also elsewhere."""
Allows = Callable[[Sequence[EndableLease]], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    placement: Placement
    ends: Endables

    @property
    def leases(self) -> tuple[Lease, ...]:
        return tuple(end.lease for end in self.ends)

    @property
    def used_gpu_s(self) -> float:
        return sum(end.used_gpu_s for end in self.ends)


def without(totals: NodeTotals, ended: Collection[PodUid]) -> NodeTotals:
    ending = [lease for lease in totals.leases if lease.pod in ended]
    if not ending:
        return totals
    freed = Counter[str]()
    for lease in ending:
        freed.subtract(lease.resources)
    left = tuple(lease for lease in totals.leases if lease.pod not in ended)
    devices = {share.device for lease in ending for share in lease.shares}
    counted, _ = counted_use(
        lease for lease in left if any(share.device in devices for share in lease.shares)
    )
    uses = {
        device.uuid: _use_after(use, counted.get(device.uuid))
        for device, use in totals.node.devices
        if device.uuid in devices
    }
    return replace(totals, node=with_changes(totals.node, freed, uses), leases=left)


def _use_after(before: DeviceUse, counted: DeviceUse | None) -> DeviceUse:
    after = counted or DeviceUse()
    return structs.replace(
        after,
        fence=before.fence,
        exclusive=after.exclusive or before.claimed_by,
        claimed_by=before.claimed_by,
        claimed_until=before.claimed_until,
        held=before.held,
    )


class ClusterTrials:
    """In the cluster, leases of one node at a time have ended."""

    def __init__(self, nodes: Iterable[NodeTotals] = (), leaving: Collection[PodUid] = ()) -> None:
        self.nodes: Mapping[NodeName, NodeTotals] = {}
        """Without the leases of the leaving pods."""
        self.cluster = TrialCluster()
        self._gpus: dict[NodeName, dict[PodUid, float]] = {}
        """Of all nodes, by lease."""
        self._changed: NodeName | None = None
        self.update(nodes, leaving)

    def update(self, nodes: Iterable[NodeTotals], leaving: Collection[PodUid] = ()) -> None:
        """The same objects as before cost next to nothing."""
        self.restore()
        remaining = {totals.node.facts.name: without(totals, leaving) for totals in nodes}
        for name in self.nodes.keys() - remaining.keys():
            self.cluster.remove_node(name)
            del self._gpus[name]
        for name in sorted(remaining):
            if self.nodes.get(name) is not remaining[name]:
                self.cluster.put_node(remaining[name].node)
                self._gpus[name] = gpus_by_lease(remaining[name])
        self.nodes = {name: remaining[name] for name in sorted(remaining)}

    def leases(self) -> Iterator[tuple[Lease, float]]:
        for name, totals in self.nodes.items():
            gpus = self._gpus[name]
            for lease in totals.leases:
                yield lease, gpus[lease.pod]

    def node_as_it_is(self, request: PodRequest) -> NodeName | None:
        self.restore()
        for name in self.nodes:
            if self.cluster.placement_on(name, request) is not None:
                return name
        return None

    def placement(
        self, request: PodRequest, name: NodeName, ends: Iterable[EndableLease]
    ) -> Placement | None:
        """Return what a pod gets once these leases have ended, as they have in the cluster."""
        if name != self._changed:
            self.restore()
        self._changed = name
        ended = {end.lease.pod for end in ends}
        self.cluster.put_node(without(self.nodes[name], ended).node)
        return self.cluster.placement_on(name, request)

    def restore(self) -> None:
        if self._changed is not None:
            self.cluster.put_node(self.nodes[self._changed].node)
        self._changed = None


class RoomSearch:
    def __init__(
        self,
        request: PodRequest,
        trials: ClusterTrials,
        *,
        allows: Allows = lambda _: True,
        gangs: EndingGangs | None = None,
        most_leases: int = 1 << 30,
        most_trials: int = MAX_TRIALS,
    ) -> None:
        self._request = request
        self._trials = trials
        self._allows = allows
        self._gangs = gangs
        self._by_node: Mapping[NodeName, Sequence[EndableLease]] = {}
        self._able: dict[NodeName, tuple[list[EndableLease], tuple[int, ...] | None]] = {}
        """Of each node that was tried with all its leases ended: those that may end, and up to
        which tier they have to."""
        self._seen = set[tuple[NodeName, frozenset[PodUid]]]()
        """Of a tier: nodes with sets of leases that are tried already, of those with gangs."""
        self._most_leases = most_leases
        self._left = most_trials
        self._reserved = most_trials // 4
        self._per_node = self._reserved
        one_device = sum(container.gpus for container in request.containers) == 1
        self._on_one_device = request.same_device or one_device

    def rooms(self, candidates: Iterable[EndableLease]) -> Iterator[Room]:
        """Yield the cheapest room first; in the cluster, the leases of the last one have ended."""
        by_node: dict[NodeName, list[EndableLease]] = {}
        for endable in sorted(candidates, key=_spare_order):
            by_node.setdefault(endable.lease.node, []).append(endable)
        self._by_node = {name: by_node[name] for name in sorted(by_node)}
        self._able = {}
        for tier in sorted({endable.tier for among in by_node.values() for endable in among}):
            up_to = {name: _up_to(tier, among) for name, among in self._by_node.items()}
            yield from self._in_tier(
                tier,
                {name: among for name, among in up_to.items() if among and among[-1].tier == tier},
            )

    def _able_on(self, name: NodeName, tier: tuple[int, ...]) -> list[EndableLease]:
        """Return leases up to the tier whose end lets the pod fit, if one is of the tier.

        A node is tried when this is first called for it.
        """
        if name not in self._able:
            allowed = list[EndableLease]()
            for endable in self._by_node[name]:
                whole = self._whole((endable,))
                if whole is not None and self._allows(whole):
                    allowed.append(endable)
            self._able[name] = (allowed, self._lowest_tier(name, allowed))
        allowed, lowest = self._able[name]
        up_to = _up_to(tier, allowed)
        is_able = lowest is not None and lowest <= tier and up_to[-1].tier == tier
        return up_to if is_able else []

    def _lowest_tier(self, name: NodeName, among: Sequence[EndableLease]) -> tuple[int, ...] | None:
        if not among or not self._fits(name, among):
            return None
        tiers = sorted({endable.tier for endable in among})
        return tiers[
            bisect_left(tiers[:-1], True, key=lambda tier: self._fits(name, _up_to(tier, among)))
        ]

    def _in_tier(
        self, tier: tuple[int, ...], by_node: Mapping[NodeName, Sequence[EndableLease]]
    ) -> Iterator[Room]:
        """No lease in `by_node` exceeds the tier."""
        tried = dict.fromkeys(by_node, 0)
        among = by_node
        nodes_with_room = set[NodeName]()
        self._seen = set()
        larger: list[EndsFor] = []
        """Sets of more leases than are tried now: with whole gangs, or of a node with too many."""
        size = 0
        while (tried or larger) and size < self._most_leases:
            size += 1
            if size > 1 and among is by_node:
                among = {name: self._able_on(name, tier) for name in tried}
                tried = {name: count for name, count in tried.items() if among[name]}
            sets, too_many = self._sets_of_size(size, among, tried)
            sets += larger
            for name in too_many:
                if name not in nodes_with_room and (able := self._able_on(name, tier)):
                    sets += self._whole_sets(name, [self._spared(name, able)])
            larger = [entry for entry in sets if len(entry[1]) > size]
            for room in self._fitting(tier, [entry for entry in sets if len(entry[1]) <= size]):
                nodes_with_room.add(room.placement.node)
                yield room

    def _whole(self, ends: Endables) -> Endables | None:
        return ends if self._gangs is None else self._gangs.whole(ends)

    def _whole_sets(self, name: NodeName, sets: Iterable[Endables]) -> list[EndsFor]:
        """What has to end beside them is included."""
        whole_sets = list[EndsFor]()
        for ends in sets:
            whole = self._whole(ends)
            if whole is None:
                continue
            if any(needs_others(end.lease) for end in whole):
                key = (name, frozenset([end.lease.pod for end in whole]))
                if key in self._seen:
                    continue
                self._seen.add(key)
            whole_sets.append((name, whole))
        return whole_sets

    def _sets_of_size(
        self, size: int, able: Mapping[NodeName, Sequence[EndableLease]], tried: dict[NodeName, int]
    ) -> tuple[list[EndsFor], list[NodeName]]:
        """Nodes that have too many sets or none leave `tried`, and are returned."""
        sets = list[EndsFor]()
        over = list[NodeName]()
        for name, count in list(tried.items()):
            most = max(0, min(self._per_node - count, self._left - self._reserved))
            here = list(islice(self._sets(able[name], size), most + 1))
            if here and len(here) <= most:
                tried[name] += len(here)
                sets += self._whole_sets(name, here)
            else:
                del tried[name]
                over.append(name)
        return sets, over

    def _fitting(self, tier: tuple[int, ...], sets: Iterable[EndsFor]) -> Iterator[Room]:
        costs = [(cost_of(ends), name, ends) for name, ends in sets]
        for cost, name, ends in sorted(costs, key=lambda entry: entry[:2]):
            if cost[0] != tier or not self._allows(ends) or not self._able_on(name, tier):
                continue
            placement = self._placement(name, ends)
            if placement is not None:
                yield Room(placement=placement, ends=ends)

    def _placement(self, name: NodeName, ends: Iterable[EndableLease]) -> Placement | None:
        self._left -= 1
        return self._trials.placement(self._request, name, ends)

    def _fits(self, name: NodeName, ends: Iterable[EndableLease]) -> bool:
        return self._left > 0 and self._placement(name, ends) is not None

    def _sets(self, among: Sequence[EndableLease], size: int) -> Iterator[Endables]:
        """For a pod that needs one device, a set is of one device."""
        if not self._on_one_device:
            yield from combinations(among, size)
            return
        if size == 1:
            yield from [(endable,) for endable in among if endable.lease.shares]
            return
        on_device: dict[DeviceUuid, list[EndableLease]] = {}
        for endable in among:
            for device in {share.device for share in endable.lease.shares}:
                on_device.setdefault(device, []).append(endable)
        seen: set[tuple[PodUid, ...]] = set()
        for device in sorted(on_device):
            for ends in combinations(on_device[device], size):
                pods = tuple(endable.lease.pod for endable in ends)
                if pods not in seen:
                    seen.add(pods)
                    yield ends

    def _spared(self, name: NodeName, among: Sequence[EndableLease]) -> Endables:
        ends = list(among)
        for endable in reversed(among):
            fewer = [other for other in ends if other is not endable]
            if fewer and self._fits(name, fewer):
                ends = fewer
        return tuple(ends)


def _up_to(tier: tuple[int, ...], among: Sequence[EndableLease]) -> list[EndableLease]:
    return [endable for endable in among if endable.tier <= tier]


def _spare_order(endable: EndableLease) -> tuple[tuple[int, ...], float, PodUid]:
    return (endable.tier, endable.used_gpu_s, endable.lease.pod)


def rooms_by_few(
    request: PodRequest,
    trials: ClusterTrials,
    may_end: Callable[[Lease], bool],
    *,
    now: float,
) -> Iterator[Room]:
    """All leases are equally undesirable."""
    candidates = [
        EndableLease(lease=lease, used_gpu_s=used_gpu_s(lease, gpus, now))
        for lease, gpus in trials.leases()
        if may_end(lease)
    ]
    search = RoomSearch(
        request, trials, most_leases=FEW_LEASES, most_trials=MAX_TRIALS_WITH_FEW_LEASES
    )
    return search.rooms(candidates)
