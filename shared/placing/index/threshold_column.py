"""One amount of every node, and for each requested amount the nodes that have as much; pure.

Sets of nodes are integers with one bit per node, so that sets of thousands of nodes are combined in
microseconds. A changed node costs as much as the requested amounts between its old and its new one.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

from shared.placing.mirror.cluster_mirror import ClusterMirror
from shared.placing.mirror.node_mirror import MirroredNode

CACHED_THRESHOLDS = 1024
FIRST_POSITIONS = (1 << 256) - 1
"""Where these are enough, a set is not searched further."""
ABSENT = -(1 << 62)
"""The amount of a node that was removed: less than any requested one."""

NodeSet = int
"""A bit for each node, at its position."""

_AS_DIGITS = bytes.maketrans(b"\x00\x01", b"01")


class NodePositions:
    """The position of each node in the sets; a removed node's position is used again."""

    def __init__(self, mirror: ClusterMirror) -> None:
        self.mirror = mirror
        self.nodes: list[MirroredNode | None] = []
        self.positions: dict[MirroredNode, int] = {}
        self.all: NodeSet = 0
        """All nodes of the mirror."""
        self._free: list[int] = []
        self._seen_changes = -1

    def catch_up(self) -> None:
        """Follow the mirror: nodes that came or went."""
        changes = self.mirror.inventory_changes
        if self._seen_changes == changes.end:
            return
        changed = changes.since(self._seen_changes) if self._seen_changes >= 0 else None
        if changed is None:
            changed = [*self.positions, *self.mirror.nodes.values()]
        for node in dict.fromkeys(changed):
            if node.removed:
                self._remove(node)
            elif node not in self.positions:
                self._add(node)
        self._seen_changes = changes.end

    def _add(self, node: MirroredNode) -> None:
        position = self._free.pop() if self._free else len(self.nodes)
        if position == len(self.nodes):
            self.nodes.append(None)
        self.nodes[position] = node
        self.positions[node] = position
        self.all |= 1 << position

    def _remove(self, node: MirroredNode) -> None:
        position = self.positions.pop(node, None)
        if position is not None:
            self.nodes[position] = None
            self._free.append(position)
            self.all ^= 1 << position


class ThresholdColumn:
    """An amount of each node, and the nodes with at least each amount that was requested.

    Sets may contain positions that no node has any more.
    """

    def __init__(self, positions: NodePositions, amount_of: Callable[[MirroredNode], int]) -> None:
        self.amount_of = amount_of
        self._positions = positions
        self.amounts: list[int] = []
        """By position, as of the last `catch_up`."""
        self._thresholds: list[int] = []
        self._sets: list[NodeSet] = []
        self._seen_changes = -1

    def at_least(self, threshold: int) -> NodeSet:
        """Return the nodes that have `threshold` or more, as of the last `catch_up`."""
        at = bisect_left(self._thresholds, threshold)
        if at < len(self._thresholds) and self._thresholds[at] == threshold:
            return self._sets[at]
        if at and not self._sets[at - 1]:
            return 0
        if len(self._thresholds) >= CACHED_THRESHOLDS:
            self._thresholds.clear()
            self._sets.clear()
            at = 0
        self._thresholds.insert(at, threshold)
        self._sets.insert(at, _set_of(self.amounts, threshold))
        return self._sets[at]

    def catch_up(self) -> None:
        """Apply the mirror's changes since the last call, each node once."""
        changes = self._positions.mirror.changes
        if self._seen_changes == changes.end:
            return
        changed = changes.since(self._seen_changes) if self._seen_changes >= 0 else None
        if changed is None:
            self._rebuild()
        else:
            for node in dict.fromkeys(changed) if len(changed) > 1 else changed:
                self._update(node)
        self._seen_changes = changes.end

    def _rebuild(self) -> None:
        amount_of = self.amount_of
        nodes = self._positions.nodes
        self.amounts = [ABSENT if node is None else amount_of(node) for node in nodes]
        self._thresholds.clear()
        self._sets.clear()

    def _update(self, node: MirroredNode) -> None:
        position = self._positions.positions.get(node)
        if position is None:
            return
        amounts = self.amounts
        while len(amounts) <= position:
            amounts.append(ABSENT)
        before, after = amounts[position], self.amount_of(node)
        if before == after:
            return
        amounts[position] = after
        low, high = (before, after) if before < after else (after, before)
        thresholds = self._thresholds
        first, end = bisect_right(thresholds, low), bisect_right(thresholds, high)
        if first != end:
            bit, sets = 1 << position, self._sets
            for at in range(first, end):
                sets[at] ^= bit


def _set_of(amounts: Sequence[int], threshold: int) -> NodeSet:
    """Return the positions of the amounts that are `threshold` or more."""
    if not amounts:
        return 0
    met = bytes(map(threshold.__le__, reversed(amounts)))
    return int(met.translate(_AS_DIGITS), 2)


def positions_in(nodes: NodeSet, limit: int) -> list[int]:
    """Return the first positions in a set."""
    found: list[int] = []
    first = nodes & FIRST_POSITIONS
    digits = bin(first if first.bit_count() >= limit else nodes)[:1:-1]
    position = digits.find("1")
    while position >= 0 and len(found) < limit:
        found.append(position)
        position = digits.find("1", position + 1)
    return found
