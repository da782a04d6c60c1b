"""Up to three places for a pod, or why there is none; pure."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import nsmallest
from itertools import islice, zip_longest
from typing import Final

from shared.model.leases.lease import Share
from shared.model.requests.host_ports import has_ports
from shared.model.requests.placement import Placement
from shared.model.requests.request import NodeOrder, PodRequest
from shared.placing.choice.container_choice import DevicePick
from shared.placing.choice.device_choice import (
    DeviceChooser,
    build_shares,
    devices_on,
    is_selective,
    numa_cpus,
)
from shared.placing.index.no_fit import NoFit
from shared.placing.index.node_index import NodeIndex
from shared.placing.index.ranked_nodes import CANDIDATES, BestNodes, PlannedKind, RequestPlan
from shared.placing.index.threshold_column import NodeSet
from shared.placing.mirror.node_mirror import MirroredNode
from shared.placing.node_filters import has_no_node_constraints, has_too_little

Rng = Callable[[], float]
"""Returns a number from 0 to below 1."""
Fit = tuple[MirroredNode, list[DevicePick]]
POWER_TOO: Final = {NodeOrder.FRAGMENTATION: "", NodeOrder.POWER: ", and by their power"}
RANDOM_TRIES: Final = 8
RARE: Final = 8
"""If fewer than one in so many nodes fit, only those are ranked."""


def place(
    request: PodRequest,
    index: NodeIndex,
    rng: Rng,
    candidates: int = CANDIDATES,
    *,
    contested: bool = False,
) -> tuple[Placement, ...] | NoFit:
    """Choose a node and its devices, and others for when the ledger has no room on the first.

    The first choice is random among nodes that tie, so that independent placers seldom choose the
    same device. The preferred mode of devices is tried on all nodes first. While choices are
    `contested`, a pod that packs gets only a node that no other placer has just used, if there is
    one.

    For example, `place(request, NodeIndex(mirror), random.random)[0].node` is the best node, if the
    result is not `NoFit`; `explain(request, index, no_fit)` then returns why, in words.
    """
    if request.node_order.compares:
        return place_compared(request, index, rng, candidates)
    plan = index.plan(request)
    kinds = plan.kinds
    if not index.mirror.divided_nodes and plan.share_kinds:
        kinds = plan.share_kinds
    has_preferences = index.eligibility.has_preferences(request.node_requirements)
    requirements = request.node_requirements
    is_narrow = plan.refused or has_preferences or bool(requirements.within or requirements.domains)
    if len(kinds) == 1 and not is_narrow:
        placements = _likely_placements(
            request, plan, index, kinds[0], rng, candidates=candidates, contested=contested
        )
        if placements:
            return placements
    fitting = index.fitting_nodes(request)
    plan.refused = isinstance(fitting, NoFit)
    if isinstance(fitting, NoFit):
        return fitting
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
    """Return () if every node has to be checked."""
    ranked = index.likely_nodes(kind)
    need = kind.need
    if contested and ranked.packs:
        uncontested = ranked.uncontested_nodes(need, rng)
        placements = _placements(request, plan, index, uncontested, 1)
        if placements:
            return placements
    if candidates == 1:
        node = ranked.random_best(need, rng)
        picks = None if node is None else picks_on(request, plan.choose, index, node)
        if node is not None and picks is not None:
            return (placement_of(node, picks),)
    likely = _random_nodes(ranked.best_nodes(need), rng)
    return _placements(request, plan, index, likely, candidates)


def _best_nodes(
    request: PodRequest,
    index: NodeIndex,
    kinds: Sequence[PlannedKind],
    fitting: NodeSet,
    rng: Rng,
) -> Iterator[MirroredNode]:
    for preferred in index.sets.by_preference(request.node_requirements, fitting):
        seen = set[MirroredNode]()
        is_rare = preferred.bit_count() * RARE < len(index.mirror.nodes)
        for planned in kinds:
            nodes = index.exact_nodes(planned.kind)
            need = planned.need
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
    fits = islice(fits_on(request, plan.choose, index, nodes), candidates)
    return tuple([placement_of(node, picks) for node, picks in fits])


def placement_of(node: MirroredNode, picks: list[DevicePick], weighed: str = "") -> Placement:
    return Placement(
        node=node.name,
        shares=build_shares(picks),
        numa_cpus=numa_cpus(picks) if node.aligns_numa else {},
        node_version=node.version,
        weighed=weighed,
    )


def where_placed(
    request: PodRequest, index: NodeIndex
) -> tuple[MirroredNode, tuple[Share, ...]] | None:
    placements = place(request, index, lambda: 0.0, 1)
    if isinstance(placements, NoFit):
        return None
    return index.mirror.nodes[placements[0].node], placements[0].shares


def _random_nodes(best: BestNodes, rng: Rng) -> Iterator[MirroredNode]:
    among = best.tied
    seen = set[int]()
    for _ in range(min(RANDOM_TRIES, 2 * best.total)):
        position = int(rng() * among)
        among = best.total
        if position not in seen:
            seen.add(position)
            yield best.node(position)


def place_before(request: PodRequest, index: NodeIndex, end: float) -> tuple[Placement, ...]:
    """Use only devices that are claimed for starts after the pod's end."""
    claimed = index.mirror.claimed.values()
    nodes = {device.node for device in claimed if device.ledger_use.claimed_until >= end}
    for node in sorted(nodes, key=lambda node: node.name):
        picks = devices_on(request, index.without_claims(node, end))
        if picks is not None:
            return (placement_of(node, picks),)
    return ()


def fits_on(
    request: PodRequest, choose: DeviceChooser, index: NodeIndex, nodes: Iterator[MirroredNode]
) -> Iterator[Fit]:
    for node in nodes:
        picks = picks_on(request, choose, index, node)
        if picks is not None:
            yield node, picks


def picks_on(
    request: PodRequest, choose: DeviceChooser, index: NodeIndex, node: MirroredNode
) -> list[DevicePick] | None:
    requirements = request.node_requirements
    if not (node.accepts_any_pod and has_no_node_constraints(requirements)) and (
        index.eligibility.check(requirements, node)[0] is not None
    ):
        return None
    if has_too_little(node.free_resources, request.resources):
        return None
    if requirements.host_ports and not has_ports(requirements.host_ports, node.free_resources):
        return None
    serving = node.serving
    for trigger in request.triggers:
        if trigger not in serving:
            return None
    return choose(node)


COMPARED_NODES = 16
"""Half of them fit most tightly, the others are random."""
ENOUGH_NODES = 8
"""If fewer nodes fit among those tried, all are computed."""
TRIED_NODES = 32
SORTED_FACTOR = 4
"""A set smaller than the square root of so many times all nodes is sorted by rank; the best of a
larger one are found sooner in the order of all nodes.
"""
WEIGHED_NODES = 3


def place_compared(
    request: PodRequest, index: NodeIndex, rng: Rng, candidates: int
) -> tuple[Placement, ...] | NoFit:
    """Choose nodes where the pod costs later pods the least of what is idle now.

    The same random numbers lead to the same choice.
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
        fitting = index.fitting_nodes(request)
        if isinstance(fitting, NoFit):
            return fitting
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
        f"policy {request.node_order} compared {len(costs)} nodes by the GPUs that the usual pods "
        f"could use before and not after{POWER_TOO[request.node_order]}: {weighed}"
    )
    return tuple([placement_of(node, picks, text) for _, _, node, picks in best[:candidates]])


def _compared(request: PodRequest, index: NodeIndex, nodes: Iterator[MirroredNode]) -> list[Fit]:
    choose = index.plan(request).choose
    return list(islice(fits_on(request, choose, index, nodes), COMPARED_NODES))


def _likely_nodes(request: PodRequest, index: NodeIndex, rng: Rng) -> Iterator[MirroredNode]:
    planned = index.plan(request).kinds[0]
    nodes = index.likely_nodes(planned)
    need = planned.need
    return _in_turn(nodes.in_order(need), nodes.random_nodes(need, TRIED_NODES, rng))


def _nodes_of(
    fitting: NodeSet, request: PodRequest, index: NodeIndex, rng: Rng
) -> Iterator[MirroredNode]:
    planned = index.plan(request).kinds[0]
    ranked = index.ranked_nodes(planned.kind)
    need = planned.need
    tight: Iterator[MirroredNode]
    count = fitting.bit_count()
    if count * count > SORTED_FACTOR * len(index.mirror.nodes):
        tight = filter(index.sets.membership(fitting), ranked.in_order(need))
    else:
        tight = iter(nsmallest(TRIED_NODES, index.sets.nodes_in(fitting), key=ranked.rank_of))
    return _in_turn(tight, index.sets.random_nodes(fitting, TRIED_NODES, rng))


def _in_turn(
    first: Iterator[MirroredNode], other: Iterator[MirroredNode]
) -> Iterator[MirroredNode]:
    """Yield each node once, up to `TRIED_NODES` of each."""
    seen = set[MirroredNode]()
    for pair in zip_longest(islice(first, TRIED_NODES), other):
        for node in pair:
            if node is not None and node not in seen:
                seen.add(node)
                yield node
