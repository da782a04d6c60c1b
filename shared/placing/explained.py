"""Placing a pod, or the reasons in words; pure."""

from shared.model.requests.placement import Placement, Refusal
from shared.model.requests.request import PodRequest
from shared.placing.index.no_fit import NoFit
from shared.placing.index.node_index import NodeIndex
from shared.placing.index.ranked_nodes import CANDIDATES
from shared.placing.placement import Rng, place
from shared.placing.refusal.refusals import explain


def place_explained(
    request: PodRequest, index: NodeIndex, rng: Rng, candidates: int = CANDIDATES
) -> tuple[Placement, ...] | Refusal:
    decision = place(request, index, rng, candidates)
    if isinstance(decision, NoFit):
        return explain(request, index, decision)
    return decision
