"""Nodes divided into classes, each node when it is first needed and again once it changed; pure."""

from collections.abc import Callable
from typing import Generic, TypeVar

from shared.placing.index.threshold_column import (
    NodePositions,
    NodeSet,
    nodes_at,
    positions_in,
)
from shared.placing.mirror.cluster_mirror import ChangeLog
from shared.placing.mirror.node_mirror import MirroredNode

Class = TypeVar("Class")


class NodeClasses(Generic[Class]):
    """The class of each node, as sets of nodes."""

    def __init__(
        self,
        positions: NodePositions,
        changes: ChangeLog,
        class_of: Callable[[MirroredNode], Class],
    ) -> None:
        self._positions = positions
        self._changes = changes
        self._class_of = class_of
        self._known: NodeSet = 0
        self._sets: dict[Class, NodeSet] = {}
        self._seen_changes = changes.end

    def split(self, nodes: NodeSet) -> dict[Class, NodeSet]:
        """Divide the nodes into their classes."""
        self._catch_up()
        unknown = nodes & ~self._known
        if unknown:
            self._classify(unknown)
        found = ((each, members & nodes) for each, members in self._sets.items())
        return {each: members for each, members in found if members}

    def _classify(self, unknown: NodeSet) -> None:
        members = self._positions.nodes
        found: dict[Class, list[int]] = {}
        for position in positions_in(unknown, unknown.bit_count()):
            node = members[position]
            if node is not None:
                found.setdefault(self._class_of(node), []).append(position)
        for each, positions in found.items():
            self._sets[each] = self._sets.get(each, 0) | nodes_at(positions)
        self._known |= unknown

    def _catch_up(self) -> None:
        changes = self._changes
        if self._seen_changes == changes.end:
            return
        changed = changes.since(self._seen_changes)
        self._seen_changes = changes.end
        if changed is None:
            self._known = 0
            self._sets.clear()
            return
        # The position of a removed node counts as changed once another node has it.
        positions = self._positions.positions
        kept = ~nodes_at({positions[node] for node in changed if node in positions})
        self._known &= kept
        self._sets = {
            each: members & kept for each, members in self._sets.items() if members & kept
        }
