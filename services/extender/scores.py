"""Scores of nodes by the policy in force, 0 to 10; pure.

kube-scheduler multiplies a score by 10 and the extender's weight, adds its own plugins' scores and
chooses a node with the highest sum. One node gets 10, so that the choice is known in advance.
"""

from collections.abc import Sequence

from shared.model.names import NodeName
from shared.model.request import NodeOrder, PodRequest
from shared.placing.choice.device_choice import allowed_modes, choose_devices
from shared.placing.index.node_index import NodeIndex
from shared.placing.index.node_rank import request_kind
from shared.placing.index.ranked_nodes import LAST_RANK
from shared.placing.mirror.node_mirror import MirroredNode

BEST = 10
COMPARED_NODES = 16
"""Nodes that the policy `fragmentation` compares, those that fit most tightly."""


def scores(
    request: PodRequest, offered: Sequence[NodeName], index: NodeIndex
) -> dict[NodeName, int]:
    """Return the score of each offered node that the mirror has; the best one alone has 10.

    Of equal nodes the one whose name sorts first is the best.
    """
    nodes = [node for name in offered if (node := index.mirror.nodes.get(name)) is not None]
    costs = _ranks(request, nodes, index)
    if request.node_order is NodeOrder.FRAGMENTATION:
        costs = _fragmentation(request, nodes, costs, index)
    if not costs:
        return {}
    grades = {cost: number for number, cost in enumerate(sorted(set(costs.values())))}
    best = min(costs, key=lambda name: (costs[name], name))
    scale = (BEST - 1) / max(1, len(grades))
    found = {name: round((len(grades) - grades[cost]) * scale) for name, cost in costs.items()}
    return {**found, best: BEST}


def _ranks(
    request: PodRequest, nodes: Sequence[MirroredNode], index: NodeIndex
) -> dict[NodeName, float]:
    kinds = [request_kind(request, mode)[0] for mode in allowed_modes(request)]
    ranked = [index.ranked_nodes(kind) for kind in kinds]

    def cost(node: MirroredNode) -> float:
        """Nodes for the preferred mode come before those for another one."""
        for number, by_rank in enumerate(ranked):
            rank = by_rank.rank_of(node)
            if rank != LAST_RANK:
                return rank + number * float(LAST_RANK)
        return len(ranked) * float(LAST_RANK)

    return {node.name: cost(node) for node in nodes}


def _fragmentation(
    request: PodRequest,
    nodes: Sequence[MirroredNode],
    ranks: dict[NodeName, float],
    index: NodeIndex,
) -> dict[NodeName, float]:
    """Return what the pod costs later pods on each node; of nodes not compared, more than that."""
    index.fragmentation.catch_up()
    compared = sorted(nodes, key=lambda node: (ranks[node.name], node.name))[:COMPARED_NODES]
    costs: dict[NodeName, float] = {}
    for node in compared:
        picks = choose_devices(request, node)
        if picks is not None:
            costs[node.name] = index.fragmentation.cost(request, node, picks)
    worst = max(costs.values(), default=0.0) + 1
    return {node.name: costs.get(node.name, worst) for node in nodes}
