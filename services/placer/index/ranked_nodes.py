"""Nodes sorted by rank, kept so by following the mirror's changes: cheap to ask, cheap to keep.

A lane costs nothing while nobody asks it; then it works off what changed since, each node once.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import islice

from services.placer.index.ranking import Rank, Ranking, has_gap, is_band, skip_to
from services.placer.mirror.cluster_mirror import Mirror
from services.placer.mirror.node_mirror import NodeState

WINDOW_NODES = 64
"""At most so many nodes are a toss-up, and at most one in `WINDOW_PART` of all."""
WINDOW_PART = 16
WINDOW_GROUPS = 8
CANDIDATES = 3


class Window:
    """The best nodes of a lane, as groups of equal rank."""

    __slots__ = ("groups", "near", "total")

    def __init__(self) -> None:
        self.groups: list[list[NodeState]] = []
        self.near = 0
        """Nodes, from the first on, between which the first choice is a toss-up."""
        self.total = 0

    def node(self, position: int) -> NodeState:
        """Return the node at a position from 0 to `total` - 1."""
        for group in self.groups:
            if position < len(group):
                return group[position]
            position -= len(group)
        raise IndexError(position)


class Lane:
    """Nodes grouped by rank; the ranks in order."""

    def __init__(self, mirror: Mirror, ranking: Ranking, *, packs: bool) -> None:
        self.mirror = mirror
        self.ranking = ranking
        self.packs = packs
        self.ranks: list[Rank] = []
        self.groups: dict[Rank, list[NodeState]] = {}
        self._rank_of: dict[NodeState, Rank] = {}
        self._place_of: dict[NodeState, int] = {}
        self._seen = -1

    def __len__(self) -> int:
        return len(self._rank_of)

    def catch_up(self) -> None:
        """Work off what changed in the mirror since the last time."""
        changes = self.mirror.changes
        if self._seen == changes.end:
            return
        changed = changes.since(self._seen) if self._seen >= 0 else None
        if changed is None:
            self._clear()
            for node in self.mirror.nodes.values():
                self.update(node)
        elif len(changed) == 1:
            self.update(changed[0])
        else:
            for node in dict.fromkeys(changed):
                self.update(node)
        self._seen = changes.end

    def update(self, node: NodeState) -> None:
        """Put one node where it belongs now."""
        rank = None if node.gone else self.ranking(node)
        known = self._rank_of.get(node)
        if rank == known:
            return
        if known is not None:
            self._take_out(node, known)
        if rank is not None:
            group = self.groups.get(rank)
            if group is None:
                group = self.groups[rank] = []
                insort(self.ranks, rank)
            self._rank_of[node] = rank
            self._place_of[node] = len(group)
            group.append(node)

    def walk(self, need: int) -> Iterator[Rank]:
        """Yield the ranks of nodes whose gap is `need` or more, best first."""
        ranks, packs = self.ranks, self.packs
        at = self._start(need)
        while at < len(ranks):
            rank = ranks[at]
            if packs or has_gap(rank, need, packs=packs):
                yield rank
                at += 1
            else:
                at = bisect_left(ranks, skip_to(rank, need, packs=packs), at + 1)

    def window(self, need: int) -> Window:
        """Return the best nodes with a gap of `need` or more: one at least, if there is any."""
        window = Window()
        limit = max(1, min(WINDOW_NODES, len(self.mirror.nodes) // WINDOW_PART))
        packs, groups = self.packs, self.groups
        if packs:
            start = self._start(need)
            ranks: Iterable[Rank] = self.ranks[start : start + WINDOW_GROUPS]
        else:
            ranks = islice(self.walk(need), WINDOW_GROUPS)
        first, total, near, found = -1, 0, 0, window.groups
        for rank in ranks:
            if first < 0:
                first = rank
            group = groups[rank]
            found.append(group)
            if near == total and total < limit and is_band(first, rank, packs=packs):
                near += len(group)
            total += len(group)
            if total >= limit and total >= CANDIDATES:
                break
        window.near, window.total = near, total
        return window

    def _start(self, need: int) -> int:
        return bisect_left(self.ranks, skip_to(0, need, packs=True)) if self.packs else 0

    def _take_out(self, node: NodeState, rank: Rank) -> None:
        group = self.groups[rank]
        at = self._place_of.pop(node)
        del self._rank_of[node]
        last = group.pop()
        if last is not node:
            group[at] = last
            self._place_of[last] = at
        if not group:
            del self.groups[rank]
            del self.ranks[bisect_left(self.ranks, rank)]

    def _clear(self) -> None:
        self.ranks.clear()
        self.groups.clear()
        self._rank_of.clear()
        self._place_of.clear()
