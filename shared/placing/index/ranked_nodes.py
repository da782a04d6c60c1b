"""Nodes sorted by rank, kept sorted by following the mirror's changes; pure.

Ranked nodes cost nothing until they are read; a read applies the changes since, each node once.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import nsmallest
from itertools import chain, islice
from typing import Final

from shared.placing.index.node_rank import (
    HEADROOM_BITS,
    MAX_FULLNESS,
    NO_RANK,
    Rank,
    Ranking,
    has_headroom,
    next_rank_with_headroom,
)
from shared.placing.mirror.cluster_mirror import ClusterMirror
from shared.placing.mirror.node_mirror import MirroredNode

TIE_NODES: Final = 64
"""The first choice is random among at most so many nodes, and at most one in `TIE_SHARE` of all."""
TIE_SHARE: Final = 16
BEST_GROUPS: Final = 8
UNCONTESTED_NODES: Final = 4
RECENT_CHANGES: Final = 64
"""Others have just used a node if they changed it within so many changes of the ledger."""
SEARCHED_NODES: Final = 256
"""Nodes, best first, among which those that others have not just used are searched."""
CANDIDATES: Final = 3
LAST_RANK: Rank = 1 << 62


class BestNodes:
    """The best of the ranked nodes, as groups of equal rank."""

    __slots__ = ("ends", "groups", "tied", "total")

    def __init__(self) -> None:
        self.groups: list[list[MirroredNode]] = []
        self.ends: list[int] = []
        """The position after the last node of each group."""
        self.tied = 0
        """How many nodes, from the first on, tie: the first choice is random among them."""
        self.total = 0

    def node(self, position: int) -> MirroredNode:
        """Return the node at a position from 0 to `total` - 1."""
        ends = self.ends
        at = bisect_right(ends, position)
        return self.groups[at][position - ends[at]]


class NodePlace:
    """Where a node is among the ranked ones."""

    __slots__ = ("changes", "position", "rank")

    def __init__(self) -> None:
        self.changes = -1
        """`MirroredNode.changes` when its rank was determined."""
        self.rank = NO_RANK
        self.position = 0
        """Within the group of its rank."""


class RankedNodes:
    """Nodes grouped by rank; the ranks in order."""

    def __init__(self, mirror: ClusterMirror, ranking: Ranking) -> None:
        self.mirror = mirror
        self.ranking = ranking
        self.packs = ranking.packs
        self.ranks: list[Rank] = []
        self.groups: dict[Rank, list[MirroredNode]] = {}
        self._places: dict[MirroredNode, NodePlace] = {}
        self._seen_changes = -1
        self._uncontested: dict[int, tuple[Sequence[MirroredNode], Sequence[MirroredNode]]] = {}
        """By headroom, used and idle nodes that others have not just used."""
        self._uncontested_at = -1

    def catch_up(self) -> None:
        """Apply the mirror's changes since the last call."""
        changes = self.mirror.changes
        end = changes.end
        if self._seen_changes == end:
            return
        changed = changes.since(self._seen_changes) if self._seen_changes >= 0 else None
        if changed is None:
            self.ranks.clear()
            self.groups.clear()
            self._places.clear()
            changed = list(self.mirror.nodes.values())
        for node in changed:
            self.update(node)
        self._seen_changes = end

    def update(self, node: MirroredNode) -> None:
        """Move one node to its current rank."""
        place = self._places.get(node)
        if place is None:
            place = self._places[node] = NodePlace()
        elif place.changes == node.changes:
            return
        place.changes = node.changes
        rank, known = NO_RANK if node.removed else self.ranking.rank(node), place.rank
        if rank != known:
            if known != NO_RANK:
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
        place.rank, place.position = rank, len(group)
        group.append(node)

    def ranks_with_headroom(self, need: int) -> Iterator[Rank]:
        """Yield the ranks of nodes whose headroom is `need` or more, best first."""
        ranks, packs = self.ranks, self.packs
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
        """Return the best nodes with a headroom of `need` or more: at least one, if any exists.

        With `accepts`, the best of the nodes that it accepts, of each rank up to `TIE_NODES`.
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
        """Return a random node of those that tie for the first choice; None: none has headroom."""
        ranks, packs = self.ranks, self.packs
        at, end = self._start(need), len(ranks)
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
        """Yield the ranks of nodes that are accepted, best first, and add these to the groups."""
        for rank in self.ranks_with_headroom(need):
            nodes = list(islice(filter(accepts, self.groups[rank]), TIE_NODES))
            if nodes:
                groups[rank] = nodes
                yield rank

    def best_of(self, nodes: Iterable[MirroredNode], need: int) -> BestNodes:
        """Return the best of these nodes with a headroom of `need` or more."""
        groups: dict[Rank, list[MirroredNode]] = {}
        for node in nodes:
            rank = self._rank(node)
            if rank != NO_RANK and has_headroom(rank, need, packs=self.packs):
                groups.setdefault(rank, []).append(node)
        return self._best(nsmallest(BEST_GROUPS, groups), groups)

    def _best(self, ranks: Iterable[Rank], groups: Mapping[Rank, list[MirroredNode]]) -> BestNodes:
        """Return groups in order of rank, and how many of their nodes tie.

        BINPACK never starts to use an idle node while a used one fits; SPREAD stays within one
        level of fullness.
        """
        best, packs = BestNodes(), self.packs
        limit = max(1, min(TIE_NODES, len(self.mirror.nodes) // TIE_SHARE))
        enough = max(limit, CANDIDATES)
        first, total, tied, found, ends = -1, 0, 0, best.groups, best.ends
        for rank in ranks:
            group = groups[rank]
            level = _level(rank, packs=packs)
            if first < 0:
                first = level
            if level == first and tied == total and total < limit:
                tied += len(group)
            total += len(group)
            found.append(group)
            ends.append(total)
            if total >= enough:
                break
        best.tied, best.total = tied, total
        return best

    def rank_of(self, node: MirroredNode) -> Rank:
        """Return the rank of a node; one without a rank comes after all others."""
        rank = self._rank(node)
        return LAST_RANK if rank == NO_RANK else rank

    def ranks_of(self, nodes: Iterable[MirroredNode]) -> list[Rank]:
        """Return `rank_of` of each node."""
        return [self.rank_of(node) for node in nodes]

    def _rank(self, node: MirroredNode) -> Rank:
        place = self._places.get(node)
        return NO_RANK if place is None else place.rank

    def in_order(self, need: int) -> Iterator[MirroredNode]:
        """Yield the nodes with a headroom of `need` or more, best first."""
        for rank in self.ranks_with_headroom(need):
            yield from self.groups[rank]

    def uncontested_nodes(self, need: int, rng: Callable[[], float]) -> Iterator[MirroredNode]:
        """Yield the best nodes with a headroom of `need` or more that others have not just used.

        Only for BINPACK. First up to `UNCONTESTED_NODES` used ones in random order, and only then
        as many idle ones; the same ones until the ledger changes or no used one has the headroom,
        so that the batches of different placers use different nodes.
        """
        if self._uncontested_at != self.mirror.applied_changes:
            self._uncontested_at = self.mirror.applied_changes
            self._uncontested.clear()
        known, idle = self._uncontested.get(need, ((), ()))
        used = [node for node in known if has_headroom(self._rank(node), need, packs=True)]
        if not used:
            used, idle = self._uncontested[need] = self._find_uncontested(need, rng)
        first = int(rng() * len(used))
        yield from chain(used[first:], used[:first], idle)

    def _find_uncontested(
        self, need: int, rng: Callable[[], float]
    ) -> tuple[list[MirroredNode], list[MirroredNode]]:
        """Return used nodes, best first, and if those are fewer than wanted, idle ones."""
        used: list[MirroredNode] = []
        idle: list[MirroredNode] = []
        since, left = self.mirror.applied_changes - RECENT_CHANGES, SEARCHED_NODES
        for rank in self.ranks_with_headroom(need):
            found = idle if rank & MAX_FULLNESS == MAX_FULLNESS else used
            group = self.groups[rank]
            start = int(rng() * len(group))
            for node in islice(chain(group[start:], group[:start]), left):
                if node.changed_by_others < since:
                    found.append(node)
                    if len(found) == UNCONTESTED_NODES:
                        return used, idle
            left -= len(group)
            if left <= 0:
                break
        return used, idle

    def random_nodes(
        self, need: int, count: int, rng: Callable[[], float]
    ) -> Iterator[MirroredNode]:
        """Yield nodes of random ranks with a headroom of `need` or more, some perhaps twice."""
        start, ranks, groups = self._start(need), self.ranks, self.groups
        fitting = len(ranks) - start
        for _ in range(count if fitting else 0):
            group = groups[ranks[start + int(rng() * fitting)]]
            yield group[int(rng() * len(group))]

    def _start(self, need: int) -> int:
        if not self.packs:
            return 0
        return bisect_left(self.ranks, next_rank_with_headroom(0, need, packs=True))


def _level(rank: Rank, *, packs: bool) -> int:
    """Return what nodes that tie share: BINPACK: 1 if they are idle, else 0; SPREAD: the fullness.

    So BINPACK never starts to use an idle node while a used one fits.
    """
    return rank & MAX_FULLNESS == MAX_FULLNESS if packs else rank >> HEADROOM_BITS
