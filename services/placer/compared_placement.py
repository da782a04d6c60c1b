"""Placement by the policy `fragmentation`: a sample of the nodes that fit is compared; pure."""

from collections.abc import Callable, Iterable, Iterator
from heapq import nsmallest
from itertools import islice, zip_longest

from shared.model.placement import Placement, Refusal
from shared.model.request import PodRequest
from shared.placing.choice.device_choice import DeviceChooser
from shared.placing.choice.picks import DevicePick, build_shares
from shared.placing.device_filters import is_selective
from shared.placing.index.node_index import NodeIndex
from shared.placing.index.threshold_column import NodeSet
from shared.placing.mirror.node_mirror import MirroredNode
from shared.placing.node_filters import has_no_node_constraints, has_too_little
from shared.placing.refusal.refusals import cached_refusal, explain_refusal

COMPARED_NODES = 16
"""Nodes that are compared; half of them are those that fit most tightly, the others random."""
ENOUGH_NODES = 8
"""With fewer nodes that fit among those tried, all nodes that fit are computed."""
TRIED_NODES = 32
SORTED_FACTOR = 4
"""A set of fewer nodes than the square root of so many times all nodes is sorted by rank. The best
of a larger set are found sooner among all nodes, which are in order already."""
WEIGHED_NODES = 3
"""Nodes that the lease records the costs of."""

Rng = Callable[[], float]
"""Returns a random number from 0 to below 1."""
Fit = tuple[MirroredNode, list[DevicePick]]


def place_compared(
    request: PodRequest, index: NodeIndex, rng: Rng, candidates: int
) -> tuple[Placement, ...] | Refusal:
    """Choose the nodes on which the pod costs later pods the least of what is idle now.

    On each node the pod gets the devices of its own device order. The same random numbers lead to
    the same choice.
    """
    fits: list[Fit] = []
    requirements = request.node_requirements
    if (
        has_no_node_constraints(requirements)
        and not is_selective(request.selection)
        and not index.eligibility.has_preferences(requirements)
    ):
        fits = _compared(request, index, _likely_nodes(request, index, rng))
    if len(fits) < ENOUGH_NODES:
        refusal = None if fits else cached_refusal(request, index)
        if refusal is not None:
            return refusal
        fitting, excluded = index.sets.split(request, explained=False)
        if not fitting:
            return explain_refusal(request, index, excluded)
        nodes = next(index.sets.by_preference(request.node_requirements, fitting))
        fits = _compared(request, index, _nodes_of(nodes, request, index, rng))
    return _least_costly(request, index, fits, candidates)


def _least_costly(
    request: PodRequest, index: NodeIndex, fits: Iterable[Fit], candidates: int
) -> tuple[Placement, ...]:
    fragmentation = index.fragmentation
    fragmentation.catch_up()
    costs = [
        (fragmentation.cost(request, node, picks), number, node, picks)
        for number, (node, picks) in enumerate(fits)
    ]
    costs.sort(key=lambda entry: entry[:2])
    best = costs[:WEIGHED_NODES]
    weighed = ", ".join(f"{cost / 1000:.2f} on {node.name}" for cost, _, node, _ in best)
    text = (
        f"policy fragmentation compared {len(costs)} nodes by the GPUs that the usual pods could "
        f"use before and not after: {weighed}"
    )
    return tuple(
        Placement(
            node=node.name,
            shares=build_shares(picks),
            node_version=node.version,
            weighed=text,
        )
        for _, _, node, picks in best[:candidates]
    )


def _compared(request: PodRequest, index: NodeIndex, nodes: Iterator[MirroredNode]) -> list[Fit]:
    choose = index.plans.plan(request).choose
    return list(islice(fits_on(request, choose, index, nodes), COMPARED_NODES))


def fits_on(
    request: PodRequest, choose: DeviceChooser, index: NodeIndex, nodes: Iterator[MirroredNode]
) -> Iterator[Fit]:
    """Yield those of the nodes that fit, with devices."""
    for node in nodes:
        picks = picks_on(request, choose, index, node)
        if picks is not None:
            yield node, picks


def picks_on(
    request: PodRequest, choose: DeviceChooser, index: NodeIndex, node: MirroredNode
) -> list[DevicePick] | None:
    """Return the devices that a pod gets on a node, or None if it does not fit."""
    requirements = request.node_requirements
    if not (node.accepts_any_pod and has_no_node_constraints(requirements)) and (
        index.eligibility.check(requirements, node)[0] is not None
    ):
        return None
    if has_too_little(node.free_resources, request.resources):
        return None
    serving = node.serving
    for trigger in request.triggers:
        if trigger not in serving:
            return None
    return choose(node)


def _likely_nodes(request: PodRequest, index: NodeIndex, rng: Rng) -> Iterator[MirroredNode]:
    """Yield nodes that probably fit."""
    planned = index.plans.plan(request).kinds[0]
    nodes, need = index.likely_nodes(planned), planned.need
    return _in_turn(nodes.in_order(need), nodes.random_nodes(need, TRIED_NODES, rng))


def _nodes_of(
    fitting: NodeSet, request: PodRequest, index: NodeIndex, rng: Rng
) -> Iterator[MirroredNode]:
    """Yield nodes of a set."""
    planned = index.plans.plan(request).kinds[0]
    ranked, need = index.ranked_nodes(planned.kind), planned.need
    tight: Iterator[MirroredNode]
    count = fitting.bit_count()
    if count * count > SORTED_FACTOR * len(index.mirror.nodes):
        tight = filter(index.sets.membership(fitting), ranked.in_order(need))
    else:
        tight = iter(nsmallest(TRIED_NODES, index.sets.nodes_in(fitting), key=ranked.rank_of))
    return _in_turn(tight, index.sets.random_nodes(fitting, TRIED_NODES, rng))


def _in_turn(one: Iterator[MirroredNode], other: Iterator[MirroredNode]) -> Iterator[MirroredNode]:
    """Yield nodes of both in turn, each node once, up to `TRIED_NODES` of each."""
    seen = set[MirroredNode]()
    for pair in zip_longest(islice(one, TRIED_NODES), other):
        for node in pair:
            if node is not None and node not in seen:
                seen.add(node)
                yield node
