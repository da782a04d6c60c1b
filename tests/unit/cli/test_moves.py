"""Plans of moves: the fewest pods, and only those that fit elsewhere."""

from collections.abc import Mapping

from services.cli.plan.moves import MovePlan, plan_moves
from shared.model.ledger import NodeTotals
from shared.model.names import PodUid
from shared.model.request import NodeRequirements, NodeTerm, PodRequest
from tests.support.build import gpu, request
from tests.unit.cli.test_what_if import NOW, held, totals


def requests(**wanted: PodRequest) -> Mapping[PodUid, PodRequest]:
    return {PodUid(name): each for name, each in wanted.items()}


def plan(
    memory: int,
    nodes: list[NodeTotals],
    of: Mapping[PodUid, PodRequest],
    *,
    staying: frozenset[str] = frozenset(),
) -> MovePlan | None:
    movable = {pod: each for pod, each in of.items() if pod not in staying}
    return plan_moves(request(gpu(memory=memory)), nodes, movable, now=NOW)


def moved(found: MovePlan | None) -> list[tuple[str, str]]:
    assert found is not None
    return [(move.uid, move.to) for move in found.moves]


HALVES = [
    totals("n1", 1, held("a", "n1", 0, 16_000, 500.0)),
    totals("n2", 1, held("b", "n2", 0, 16_000, 600.0)),
]
BOTH = requests(a=request(gpu(memory=16_000)), b=request(gpu(memory=16_000)))


def test_the_pod_that_used_least_moves_to_the_other_device() -> None:
    assert moved(plan(30_000, HALVES, BOTH)) == [("b", "n1")]


def test_pods_that_may_not_be_moved_or_are_unknown_stay() -> None:
    assert moved(plan(30_000, HALVES, BOTH, staying=frozenset({"b"}))) == [("a", "n2")]
    assert moved(plan(30_000, HALVES, requests(a=BOTH[PodUid("a")]))) == [("a", "n2")]
    assert plan(30_000, HALVES, BOTH, staying=frozenset({"a", "b"})) is None


def test_a_pod_is_moved_only_where_its_own_request_allows() -> None:
    only = NodeRequirements(required=((NodeTerm(key="zone", operator="In", values=("nowhere",)),),))
    bound = requests(
        a=request(gpu(memory=16_000)), b=request(gpu(memory=16_000), node_requirements=only)
    )

    assert moved(plan(30_000, HALVES, bound)) == [("a", "n2")]


def test_several_pods_move_where_one_is_not_enough_and_all_fit_elsewhere() -> None:
    nodes = [
        totals("n1", 1, held("a", "n1", 0, 10_000), held("b", "n1", 0, 10_000)),
        totals("n2", 1, held("c", "n2", 0, 12_000)),
    ]
    of = requests(**{name: request(gpu(memory=10_000)) for name in "ab"})

    found = plan(32_000, nodes, of)

    assert moved(found) == [("a", "n2"), ("b", "n2")]
    assert plan(32_000, [nodes[0]], of) is None
    assert found is not None
    assert [move.pod for move in found.moves] == ["default/a", "default/b"]


def test_a_pod_that_fits_needs_no_move() -> None:
    found = plan(10_000, HALVES, BOTH)

    assert found is not None
    assert not found.moves
