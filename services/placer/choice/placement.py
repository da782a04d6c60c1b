"""The decision: up to three places for a pod, or why there is none."""

from collections.abc import Callable, Iterator

from services.placer.choice.chosen_shares import shares_of
from services.placer.choice.device_choice import chooser_of, modes_of
from services.placer.index.node_index import Index
from services.placer.index.ranked_nodes import CANDIDATES, Lane
from services.placer.index.ranking import Kind, kind_of
from services.placer.mirror.node_mirror import NodeState
from services.placer.refusal.refusals import refuse
from shared.model.device import DeviceMode
from shared.model.placement import Placement, Refusal
from shared.model.request import PodRequest
from shared.placing.node_filters import has_no_node_constraints, has_too_little

DRAWS = 8
"""Nodes drawn from the best ones before they are tried in order."""
WALKED_NODES = 64
"""Nodes tried in order before every node is judged exactly."""

_SHARES = (DeviceMode.HAMI_CORE,)


def place(
    request: PodRequest, index: Index, draw: Callable[[], float]
) -> tuple[Placement, ...] | Refusal:
    """Choose a node and its devices, and others should the ledger find the first one taken.

    The first choice is drawn from the best few nodes, so that placers that do not know of each
    other rarely want the same device; all candidates are on different nodes. Nodes are ranked by
    the pod's own preferences first, then by its node order. Where both shares and MIG instances
    will do, all nodes are asked for those that come first before any is asked for the others.
    """
    if not index.eligibility.is_wanting(request.node_requirements):
        modes = modes_of(request)
        for mode in modes if index.mirror.mig_nodes or _SHARES[0] not in modes else _SHARES:
            kind, need = kind_of(request, mode)
            placements = _quickly(request, index, kind, need, draw)
            if placements:
                return placements
    verdicts = index.verdicts(request)
    placements = tuple(_fitting(request, index, _drawn(verdicts, 0, draw)))
    return placements or refuse(request, index.mirror, verdicts)


def _quickly(
    request: PodRequest, index: Index, kind: Kind, need: int, draw: Callable[[], float]
) -> tuple[Placement, ...]:
    lane = index.likely_lane(kind)
    found = tuple(_fitting(request, index, _drawn(lane, need, draw)))
    if found or index.known_verdicts(request):
        return found
    lane = index.strict_lane(kind)
    return tuple(_fitting(request, index, _walked(lane, need)))


def _fitting(request: PodRequest, index: Index, nodes: Iterator[NodeState]) -> Iterator[Placement]:
    plain, demands = has_no_node_constraints(request.node_requirements), request.node_requirements
    eligibility, triggers = index.eligibility, request.triggers
    wanted, choose = request.resources.items(), chooser_of(request)
    left = CANDIDATES
    for node in nodes:
        if not (plain and node.open) and eligibility.answer(demands, node)[0] is not None:
            continue
        if has_too_little(node.free, wanted) or not node.served.issuperset(triggers):
            continue
        picks = choose(node)
        if picks is None:
            continue
        yield Placement(node=node.name, shares=shares_of(picks), node_version=node.version)
        left -= 1
        if not left:
            return


def _drawn(lane: Lane, need: int, draw: Callable[[], float]) -> Iterator[NodeState]:
    """Draw different nodes from the best ones: the first from the toss-up, the rest from all."""
    window = lane.window(need)
    reach, seen = window.near, set[int]()
    for _ in range(min(DRAWS, 2 * window.total)):
        position = int(draw() * reach)
        reach = window.total
        if position not in seen:
            seen.add(position)
            yield window.node(position)


def _walked(lane: Lane, need: int) -> Iterator[NodeState]:
    """Go through the nodes in order, best first, to a limit."""
    left = WALKED_NODES
    for rank in lane.walk(need):
        for node in lane.groups[rank]:
            yield node
            left -= 1
            if not left:
                return
