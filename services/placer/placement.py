"""The decision: up to three places for a pod, or why there is none; pure."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from services.placer.compared_placement import Rng, fits_on, picks_on, place_compared
from shared.model.placement import Placement, Refusal
from shared.model.request import NodeOrder, PodRequest
from shared.placing.choice.picks import DevicePick, build_shares
from shared.placing.index.node_index import NodeIndex
from shared.placing.index.ranked_nodes import CANDIDATES, BestNodes
from shared.placing.index.request_plan import PlannedKind, RequestPlan
from shared.placing.index.threshold_column import NodeSet
from shared.placing.mirror.node_mirror import MirroredNode
from shared.placing.refusal.refusals import cached_refusal, explain_refusal

FRAGMENTATION: Final = NodeOrder.FRAGMENTATION
RANDOM_TRIES: Final = 8
"""Nodes tried in random order, of the best ones, before nodes are tried by rank."""
RARE: Final = 8
"""Where fewer than one in so many nodes fit, those alone are ranked; else all are tried by rank."""


def place(
    request: PodRequest,
    index: NodeIndex,
    rng: Rng,
    candidates: int = CANDIDATES,
    *,
    contested: bool = False,
) -> tuple[Placement, ...] | Refusal:
    """Choose a node and its devices, and others should the ledger have no room on the first one.

    The first choice is random among the nodes that tie, so that independent placers seldom choose
    the same device; all candidates are on different nodes. Nodes are ranked by the pod's own
    preferences first, then by its node order. Where both shares and MIG instances are allowed, all
    nodes are tried for the preferred mode before any is tried for the other.

    While choices are `contested`, a pod that packs gets a node that no other placer has just used,
    as its only candidate, if there is one.
    """
    if request.node_order is FRAGMENTATION:
        return place_compared(request, index, rng, candidates)
    plan = index.plans.plan(request)
    kinds = plan.kinds
    if not index.mirror.mig_nodes and plan.share_kinds:
        kinds = plan.share_kinds
    has_preferences = index.eligibility.has_preferences(request.node_requirements)
    if len(kinds) == 1 and not (plan.refused or has_preferences):
        placements = _likely_placements(
            request, plan, index, kinds[0], rng, candidates=candidates, contested=contested
        )
        if placements:
            return placements
    refusal = cached_refusal(request, index)
    if refusal is not None:
        return refusal
    fitting, excluded = index.sets.split(request, explained=False)
    plan.refused = not fitting
    if not fitting:
        return explain_refusal(request, index, excluded)
    nodes = _best_nodes(request, index, kinds, fitting, rng)
    return _placements(request, plan, index, nodes, candidates)


def _likely_placements(
    request: PodRequest,
    plan: RequestPlan,
    index: NodeIndex,
    kind: PlannedKind,
    rng: Rng,
    *,
    candidates: int,
    contested: bool,
) -> tuple[Placement, ...]:
    """Return placements on nodes that probably fit; none: every node has to be checked."""
    ranked, need = index.likely_nodes(kind), kind.need
    if contested and ranked.packs:
        uncontested = ranked.uncontested_nodes(need, rng)
        placements = _placements(request, plan, index, uncontested, 1)
        if placements:
            return placements
    if candidates == 1:
        node = ranked.random_best(need, rng)
        picks = None if node is None else picks_on(request, plan.choose, index, node)
        if node is not None and picks is not None:
            return (_placement(node, picks),)
    likely = _random_nodes(ranked.best_nodes(need), rng)
    return _placements(request, plan, index, likely, candidates)


def _best_nodes(
    request: PodRequest,
    index: NodeIndex,
    kinds: Sequence[PlannedKind],
    fitting: NodeSet,
    rng: Rng,
) -> Iterator[MirroredNode]:
    """Yield nodes that fit, those that the pod prefers first, then by mode and rank."""
    for preferred in index.sets.by_preference(request.node_requirements, fitting):
        seen = set[MirroredNode]()
        is_rare = preferred.bit_count() * RARE < len(index.mirror.nodes)
        for planned in kinds:
            nodes, need = index.exact_nodes(planned.kind), planned.need
            if is_rare:
                best = nodes.best_of(index.sets.nodes_in(preferred), need)
            else:
                best = nodes.best_nodes(need, index.sets.membership(preferred))
            for node in _random_nodes(best, rng):
                if node not in seen:
                    seen.add(node)
                    yield node


def _placements(
    request: PodRequest,
    plan: RequestPlan,
    index: NodeIndex,
    nodes: Iterator[MirroredNode],
    candidates: int,
) -> tuple[Placement, ...]:
    """Return placements on those of the nodes that fit, up to the number of candidates."""
    fits = islice(fits_on(request, plan.choose, index, nodes), candidates)
    return tuple([_placement(node, picks) for node, picks in fits])


def _placement(node: MirroredNode, picks: list[DevicePick]) -> Placement:
    return Placement(node=node.name, shares=build_shares(picks), node_version=node.version)


def _random_nodes(best: BestNodes, rng: Rng) -> Iterator[MirroredNode]:
    """Yield random nodes of the best ones: the first among those that tie, the rest among all."""
    among, seen = best.tied, set[int]()
    for _ in range(min(RANDOM_TRIES, 2 * best.total)):
        position = int(rng() * among)
        among = best.total
        if position not in seen:
            seen.add(position)
            yield best.node(position)
