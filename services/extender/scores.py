"""Scores of nodes by the policy in force, 0 to 10; pure.

kube-scheduler multiplies a score by 10 and the extender's weight, adds its own plugins' scores and
chooses a node with the highest sum. One node gets 10, so that the choice is known in advance.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.model.names import NodeName
from shared.model.request import NodeOrder, PodRequest
from shared.placing.choice.device_choice import allowed_modes, choose_devices
from shared.placing.index.node_index import NodeIndex
from shared.placing.index.node_rank import Rank, request_kind
from shared.placing.index.ranked_nodes import LAST_RANK
from shared.placing.mirror.node_mirror import MirroredNode

BEST = 10
MOST_NODES = 100
"""Fitting nodes of which kube-scheduler chooses one, for a pod that prefers none: below so many it
takes no sample of its own, either (`minFeasibleNodesToFind` in pkg/scheduler/schedule_one.go)."""
COMPARED_NODES = 16
"""Nodes that the policy `fragmentation` compares, those that fit most tightly."""


@dataclass(frozen=True, slots=True)
class NodeScores:
    """The score of each offered node that the mirror has; one alone has 10."""

    best: NodeName
    scores: dict[NodeName, int]


def scores(request: PodRequest, offered: Sequence[NodeName], index: NodeIndex) -> NodeScores | None:
    """Return the scores; None: the mirror has none of the nodes.

    Of equal nodes the one whose name sorts first is the best.
    """
    known = index.mirror.nodes
    nodes = [node for name in offered if (node := known.get(name)) is not None]
    if not nodes:
        return None
    costs = _ranks(request, nodes, index)
    if request.node_order is NodeOrder.FRAGMENTATION:
        costs = _fragmentation(request, nodes, costs, index)
    ordered = sorted(set(costs))
    scale = (BEST - 1) / len(ordered)
    grades = {cost: round((len(ordered) - at) * scale) for at, cost in enumerate(ordered)}
    found = {node.name: grades[cost] for node, cost in zip(nodes, costs, strict=True)}
    best = min(node.name for node, cost in zip(nodes, costs, strict=True) if cost == ordered[0])
    found[best] = BEST
    return NodeScores(best, found)


def best_nodes(
    request: PodRequest, fitting: Sequence[NodeName], index: NodeIndex
) -> list[NodeName]:
    """Return the best `MOST_NODES` of the nodes that fit, by the policy in force."""
    left = set(fitting)
    found: list[NodeName] = []
    for mode in allowed_modes(request):
        kind, need = request_kind(request, mode)
        for node in index.ranked_nodes(kind).in_order(need):
            if node.name in left:
                left.discard(node.name)
                found.append(node.name)
                if len(found) == MOST_NODES:
                    return found
    return found


def _ranks(request: PodRequest, nodes: Sequence[MirroredNode], index: NodeIndex) -> Sequence[float]:
    """Return the ranks of nodes; those for the preferred mode come before those for another one."""
    costs: list[Rank] = []
    for number, mode in enumerate(allowed_modes(request)):
        ranks = index.ranked_nodes(request_kind(request, mode)[0]).ranks_of(nodes)
        without = number * LAST_RANK
        costs = (
            [
                rank + without if cost == without else cost
                for rank, cost in zip(ranks, costs, strict=True)
            ]
            if costs
            else ranks
        )
    return costs


def _fragmentation(
    request: PodRequest, nodes: Sequence[MirroredNode], ranks: Sequence[float], index: NodeIndex
) -> Sequence[float]:
    """Return what the pod costs later pods on each node; of nodes not compared, more than that."""
    index.fragmentation.catch_up()
    order = sorted(range(len(nodes)), key=lambda at: (ranks[at], nodes[at].name))
    costs: dict[int, float] = {}
    for at in order[:COMPARED_NODES]:
        picks = choose_devices(request, nodes[at])
        if picks is not None:
            costs[at] = index.fragmentation.cost(request, nodes[at], picks)
    worst = max(costs.values(), default=0.0) + 1
    return [costs.get(at, worst) for at in range(len(nodes))]
