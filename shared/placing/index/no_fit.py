"""The decision that no node fits a request, and its explanation once there is one; pure."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from shared.model.requests.placement import NodeVerdict, Refusal
from shared.placing.advice import Advice
from shared.placing.index.node_sets import Excluded
from shared.placing.index.threshold_column import NodeSet
from shared.placing.mirror.node_mirror import MirroredNode
from shared.placing.node_filters import NodeFilterFailure

NearNode = tuple[str, MirroredNode, int]
"""Why a node is excluded, the node, and its number of changes."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A refusal in words, and what it is based on."""

    position: int
    inventory_position: int
    possible: NodeSet
    """The nodes that would fit if they were empty, as of the inventory's position."""
    details: Mapping[NearNode, tuple[NodeFilterFailure, NodeVerdict]]
    advice: Advice
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class NoFit:
    """No node fits a request: the reasons as data. `refusal.refusals.explain` puts it into words.

    For example, `excluded` is `{("InsufficientCpu", "Insufficient cpu"): 0b101}` if of three nodes
    the first and the last have too little, and the other one has been removed.
    """

    key: Hashable
    position: int
    excluded: Excluded
    """All nodes by the reason that excludes them; empty if `last` explains this decision."""
    last: Explanation | None = None
    """The last explanation for an equal request, perhaps of an earlier position."""
