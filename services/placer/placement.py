"""The decision: up to three places for a pod, or why there is none; pure."""

from collections.abc import Callable, Iterator

from services.placer.choice.device_choice import allowed_modes, device_chooser
from services.placer.choice.picks import build_shares
from services.placer.index.node_index import NodeIndex
from services.placer.index.node_rank import RequestKind, request_kind
from services.placer.index.ranked_nodes import CANDIDATES, RankedNodes
from services.placer.mirror.node_mirror import MirroredNode
from services.placer.refusal.refusals import explain_refusal
from shared.model.device import DeviceMode
from shared.model.placement import Placement, Refusal
from shared.model.request import PodRequest
from shared.placing.node_filters import has_no_node_constraints, has_too_little

RANDOM_TRIES = 8
"""Nodes tried in random order, of the best ones, before nodes are tried by rank."""
NODES_BY_RANK = 64
"""Nodes tried by rank before every node is checked exactly."""

_SHARES_ONLY = (DeviceMode.HAMI_CORE,)

Rng = Callable[[], float]
"""Returns a random number from 0 to below 1."""


def place(request: PodRequest, index: NodeIndex, rng: Rng) -> tuple[Placement, ...] | Refusal:
    """Choose a node and its devices, and others should the ledger have no room on the first one.

    The first choice is random among the nodes that tie, so that independent placers seldom choose
    the same device; all candidates are on different nodes. Nodes are ranked by the pod's own
    preferences first, then by its node order. Where both shares and MIG instances are allowed, all
    nodes are tried for the preferred mode before any is tried for the other.
    """
    if not index.eligibility.has_preferences(request.node_requirements):
        modes = allowed_modes(request)
        if not index.mirror.mig_nodes and _SHARES_ONLY[0] in modes:
            modes = _SHARES_ONLY
        for mode in modes:
            kind, need = request_kind(request, mode)
            placements = _place_from_index(request, index, kind, need, rng)
            if placements:
                return placements
    verdicts = index.verdicts(request)
    placements = tuple(_placements(request, index, _random_nodes(verdicts, 0, rng)))
    return placements or explain_refusal(request, index.mirror, verdicts)


def _place_from_index(
    request: PodRequest, index: NodeIndex, kind: RequestKind, need: int, rng: Rng
) -> tuple[Placement, ...]:
    nodes = index.likely_nodes(kind)
    placements = tuple(_placements(request, index, _random_nodes(nodes, need, rng)))
    if placements or index.has_verdicts(request):
        return placements
    nodes = index.exact_nodes(kind)
    return tuple(_placements(request, index, _nodes_by_rank(nodes, need)))


def _placements(
    request: PodRequest, index: NodeIndex, nodes: Iterator[MirroredNode]
) -> Iterator[Placement]:
    """Yield placements on those of the nodes that fit, up to the number of candidates."""
    requirements = request.node_requirements
    unconstrained = has_no_node_constraints(requirements)
    eligibility, triggers = index.eligibility, request.triggers
    resources, choose = request.resources.items(), device_chooser(request)
    left = CANDIDATES
    for node in nodes:
        if not (unconstrained and node.accepts_any_pod) and (
            eligibility.check(requirements, node)[0] is not None
        ):
            continue
        if has_too_little(node.free_resources, resources):
            continue
        if not node.serving.issuperset(triggers):
            continue
        picks = choose(node)
        if picks is None:
            continue
        yield Placement(node=node.name, shares=build_shares(picks), node_version=node.version)
        left -= 1
        if not left:
            return


def _random_nodes(nodes: RankedNodes, need: int, rng: Rng) -> Iterator[MirroredNode]:
    """Yield random nodes of the best ones: the first among those that tie, the rest among all."""
    best = nodes.best_nodes(need)
    among, seen = best.tied, set[int]()
    for _ in range(min(RANDOM_TRIES, 2 * best.total)):
        position = int(rng() * among)
        among = best.total
        if position not in seen:
            seen.add(position)
            yield best.node(position)


def _nodes_by_rank(nodes: RankedNodes, need: int) -> Iterator[MirroredNode]:
    """Yield nodes in order of rank, best first, up to a limit."""
    left = NODES_BY_RANK
    for rank in nodes.ranks_with_headroom(need):
        for node in nodes.groups[rank]:
            yield node
            left -= 1
            if not left:
                return
