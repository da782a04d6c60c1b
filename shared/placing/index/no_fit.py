"""Why no node fits a request, as data; pure."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from shared.model.requests.placement import NodeVerdict, Refusal
from shared.placing.advice import Advice
from shared.placing.index.device_stages import Excluded
from shared.placing.index.threshold_column import NodeSet
from shared.placing.mirror.node_mirror import MirroredNode
from shared.placing.node_filters import NodeFilterFailure

NearNode = tuple[str, MirroredNode, int]


@dataclass(frozen=True, slots=True)
class Explanation:
    position: int
    inventory_position: int
    possible: NodeSet
    """Nodes that would fit if they were empty, as of `inventory_position`."""
    details: Mapping[NearNode, tuple[NodeFilterFailure, NodeVerdict]]
    advice: Advice
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class NoFit:
    """`refusal.refusals.explain` puts it into words.

    For example, `excluded` is `{("InsufficientCpu", "Insufficient cpu"): 0b101}` if of three nodes
    the first and the last have too little, and the other one has been removed.
    """

    key: Hashable
    position: int
    excluded: Excluded
    """Nodes by reason; empty if `last` explains this decision."""
    last: Explanation | None = None
    """The last explanation of an equal request, perhaps of an earlier position."""
