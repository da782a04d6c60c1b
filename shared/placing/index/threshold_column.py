"""The nodes that have a requested amount; pure.

Sets of nodes are integers with one bit per node: thousands are combined in microseconds.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection
from itertools import compress, islice
from typing import TypeVar

from shared.placing.mirror.cluster_mirror import ChangeLog, ChangeReader, ClusterMirror
from shared.placing.mirror.node_mirror import MirroredNode

CACHED_THRESHOLDS = 256
RARE = 8
"""Above one in so many nodes, all are compared."""
SPARSE = 16
"""Above one in so many nodes, a set is not searched bit by bit."""
FIRST_POSITIONS = (1 << 256) - 1
ABSENT = -(1 << 62)

NodeSet = int
"""A bit for each node."""

_AS_FLAGS = bytes.maketrans(b"01", b"\x00\x01")
_AS_DIGITS = bytes.maketrans(b"\x00\x01", b"01")


class NodePositions:
    """The position of a removed node is used again."""

    def __init__(self, mirror: ClusterMirror) -> None:
        self.mirror = mirror
        self.nodes: list[MirroredNode | None] = []
        self.positions: dict[MirroredNode, int] = {}
        self.all: NodeSet = 0
        self._free: list[int] = []
        self._changes = ChangeReader(mirror.inventory_changes)

    def catch_up(self) -> None:
        changed = self._changes.read()
        if changed is None:
            changed = [*self.positions, *self.mirror.nodes.values()]
        for node in dict.fromkeys(changed):
            if node.removed:
                self._remove(node)
            elif node not in self.positions:
                self._add(node)

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
    """Sets may contain positions that no node has any more."""

    def __init__(
        self,
        positions: NodePositions,
        amount_of: Callable[[MirroredNode], int],
        changes: ChangeLog,
    ) -> None:
        self.amount_of = amount_of
        self._positions = positions
        self._changes = ChangeReader(changes)
        self.amounts: list[int] = []
        """By position, as of the last `catch_up`."""
        self._thresholds: list[int] = []
        self._sets: list[NodeSet] = []

    def at_least(self, threshold: int) -> NodeSet:
        thresholds = self._thresholds
        sets = self._sets
        at = bisect_left(thresholds, threshold)
        if at < len(thresholds) and thresholds[at] == threshold:
            return sets[at]
        above = sets[at] if at < len(sets) else 0
        below = sets[at - 1] if at else (1 << len(self.amounts)) - 1
        return above if above == below else self._derive(threshold, below, above)

    def _derive(self, threshold: int, below: NodeSet, above: NodeSet) -> NodeSet:
        """`below` and `above` are the sets of the next lower and higher threshold."""
        met, amounts = self._compare(below ^ above, threshold)
        met_nodes = above | met
        # Stored for the end of all thresholds that have the same set as a known one.
        if met_nodes == above:
            threshold = 1 + max(filter(threshold.__gt__, amounts))
        elif met_nodes == below:
            threshold = min(filter(threshold.__le__, amounts))
        thresholds = self._thresholds
        sets = self._sets
        if len(thresholds) >= CACHED_THRESHOLDS:
            del thresholds[::2], sets[::2]
        at = bisect_left(thresholds, threshold)
        thresholds.insert(at, threshold)
        sets.insert(at, met_nodes)
        return met_nodes

    def _compare(self, nodes: NodeSet, threshold: int) -> tuple[NodeSet, list[int]]:
        """Return those of the nodes that have `threshold` or more, and the amounts compared."""
        amounts = self.amounts
        count = nodes.bit_count()
        if count * RARE > len(amounts):
            met = bytes(map(threshold.__le__, reversed(amounts)))
            return nodes & int(met.translate(_AS_DIGITS), 2), amounts
        positions = positions_in(nodes, count)
        met_at = [at for at in positions if amounts[at] >= threshold]
        return nodes_at(met_at), [amounts[at] for at in positions]

    def catch_up(self) -> None:
        changed = self._changes.read()
        if changed is None:
            self._rebuild()
        else:
            for node in dict.fromkeys(changed) if len(changed) > 1 else changed:
                self._update(node)

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
        first = bisect_right(thresholds, low)
        end = bisect_right(thresholds, high)
        if first != end:
            bit = 1 << position
            sets = self._sets
            for at in range(first, end):
                sets[at] ^= bit


Key = TypeVar("Key")
Value = TypeVar("Value")


def store(cache: dict[Key, Value], key: Key, value: Value, limit: int) -> Value:
    """Return the value; the oldest is dropped beyond the limit."""
    if len(cache) >= limit:
        del cache[next(iter(cache))]
    cache[key] = value
    return value


def nodes_at(positions: Collection[int]) -> NodeSet:
    if not positions:
        return 0
    octets = bytearray((max(positions) >> 3) + 1)
    for position in positions:
        octets[position >> 3] |= 1 << (position & 7)
    return int.from_bytes(octets, "little")


def positions_in(nodes: NodeSet, limit: int) -> list[int]:
    first = nodes & FIRST_POSITIONS
    if first.bit_count() >= limit:
        nodes = first
    digits = bin(nodes)[:1:-1]
    if nodes.bit_count() * SPARSE > len(digits):
        flags = digits.encode().translate(_AS_FLAGS)
        return list(islice(compress(range(len(flags)), flags), limit))
    positions: list[int] = []
    position = digits.find("1")
    while position >= 0 and len(positions) < limit:
        positions.append(position)
        position = digits.find("1", position + 1)
    return positions
