"""What-if and defrag: what fits now, what would have to end or move, what could be added."""

from collections.abc import Mapping

import pytest
from msgspec import structs

from services.cli.plan.moves import DefragView, MovePlan, nodes_for, plan_moves
from services.cli.plan.render import forecast_text, moves_text
from shared.kubernetes.manifests import pods_in
from shared.model.devices.device import NO_USE, with_claim
from shared.model.leases.lease import Lease, ends_by
from shared.model.leases.ledger import NodeTotals, WaitingPod, counted_use, reservation_for
from shared.model.leases.preemption import PreemptionState, StoredStart
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.quantity import timestamp
from shared.model.requests.placement import Placement, Refusal
from shared.model.requests.request import NO_TERM, NodeRequirements, NodeTerm, PodRequest, Term
from shared.model.views.preemptions import PlacingView
from shared.placing.starts import lease_end, start_without_plan, waiting_units
from shared.placing.what_if import Forecast, TriedOutcome, TriedPod, forecast
from tests.support.build import (
    V100_MIB,
    device,
    gpu,
    lease,
    ledger_node,
    pod_queued,
    request,
    share,
)
from tests.support.snapshots import drawn

NOW = 1_000.0


def totals(name: str, gpus: int, *leases: Lease) -> NodeTotals:
    """Return a node GPU-<name>-0, GPU-<name>-1, ... with leases."""
    counted, _ = counted_use(leases)
    held = [device(f"GPU-{name}-{index}", index) for index in range(gpus)]
    pairs = [(each, counted[each.uuid]) if each.uuid in counted else each for each in held]
    return NodeTotals(node=ledger_node(name, *pairs), leases=leases)


def held(pod: str, name: str, index: int, mib: int, created_at: float = 0.0) -> Lease:
    part = share(f"GPU-{name}-{index}", index, memory_mib=mib, slot=0, fence=1)
    return lease(pod, name, part, created_at=created_at)


def tried(wanted: PodRequest, count: int = 1) -> list[TriedPod]:
    return [TriedPod(origin="Pod p", name="default/p", request=wanted)] * count


def places(found: Forecast) -> list[str]:
    return [each.node for each in found.pods]


@pytest.mark.parametrize(("pods", "whose"), [(1, ""), (2, "the last of them: ")])
def test_the_start_of_pods_that_would_wait_is_below_them(pods: int, whose: str) -> None:
    waits = TriedOutcome(origin="Job j", pod="default/j", refusal="no GPU is free.")
    last = structs.replace(waits, when="starts by noon")

    shown = drawn(forecast_text(Forecast(pods=(*(waits,) * (pods - 1), last))))

    assert f"  {pods} would wait: no GPU is free.\n  {whose}starts by noon\n" in shown


def test_each_pod_counts_for_those_after_it() -> None:
    nodes = [totals("n1", 1), totals("n2", 1)]

    found = forecast(tried(request(gpu(memory=20_000)), 3), nodes, now=NOW)

    assert sorted(places(found)) == ["", "n1", "n2"]
    assert len(found.waiting) == 1
    assert "2 Insufficient GPU memory" in found.waiting[0].refusal


def test_the_fewest_leases_are_named_and_of_equal_ones_those_that_used_least() -> None:
    nodes = [
        totals("n1", 1, held("a", "n1", 0, 10_000), held("b", "n1", 0, 10_000)),
        totals("n2", 2, held("old", "n2", 0, 20_000), held("new", "n2", 1, 20_000, 900.0)),
    ]

    found = forecast(tried(request(gpu(memory=30_000))), nodes, now=NOW)

    [waiting] = found.waiting
    assert waiting.room is not None
    assert waiting.room.leases == ("default/new",)


@pytest.mark.parametrize(
    ("term", "when"),
    [
        (
            Term(max_run_s=600),
            "starts by 1970-01-01T00:27:25Z at the latest: default/b and 1 more end by then",
        ),
        (NO_TERM, "no end in sight: pods that would have to end have no maximum run time"),
    ],
)
def test_pods_that_would_wait_start_once_those_before_them_have_ended(
    term: Term, when: str
) -> None:
    a = structs.replace(
        held("a", "n1", 0, V100_MIB, NOW), activated_at=NOW, term=Term(max_run_s=60)
    )
    b = structs.replace(held("b", "n2", 0, V100_MIB, NOW), activated_at=NOW, term=term)
    pods = tried(request(gpu(memory=20_000)), 2)

    found = forecast(
        pods, [totals("n1", 1, a), totals("n2", 1, b)], now=NOW, end_of=lambda e: lease_end(e, NOW)
    )

    assert [each.when for each in found.pods] == ["", when]


@pytest.mark.parametrize(
    ("gpus", "namespaces", "who"),
    [
        (5, {"default", "other"}, "default/p4, default/p3, default/p2 and 1 more"),
        (5, {"other"}, "other/p1 and 3 more"),
        (5, set(), "4 pods of other namespaces"),
        (2, {"default"}, "default/p4"),
        (1, {"default"}, ""),
        (0, {"default"}, ""),
    ],
)
def test_no_end_is_in_sight_without_those_that_would_have_to_end_first(
    gpus: int, namespaces: set[str], who: str
) -> None:
    leases = [held(f"p{n}", "n1", n, V100_MIB, created_at=n) for n in range(5)]
    leases[0] = structs.replace(leases[0], activated_at=NOW, term=Term(max_run_s=60))
    leases[1] = structs.replace(leases[1], namespace=Namespace("other"))
    wanted = request(gpu(gpus=gpus or 1, memory=V100_MIB))
    nodes = [totals("n1", 5 + (gpus == 0), *leases)]
    pod = WaitingPod(queued=pod_queued("w", wanted), refusal=Refusal(reason="full"), capacity=1)

    [unit] = waiting_units([pod], nodes, now=NOW, after_s=0)
    text = start_without_plan(
        unit, nodes, lambda e: lease_end(e, NOW), now=NOW, visible=namespaces.__contains__
    )

    at = timestamp(ends_by(leases[0]) or 0)
    soon = f"could start at {at} at the earliest, as others end; no start is planned yet"
    assert (f"is set for {who}, which would" in text) if who else text == soon * gpus


def test_nodes_to_add_are_of_the_kinds_of_the_cluster_and_as_few_as_possible() -> None:
    nodes = [totals("small", 1, held("a", "small", 0, V100_MIB)), totals("cpu", 0)]

    found = forecast(tried(request(gpu(memory=V100_MIB // 2)), 5), nodes, now=NOW)

    [added] = found.add_nodes
    assert (added.like, added.count, added.pods) == ("small", 3, 5)


def test_a_pod_that_fits_on_no_kind_of_node_needs_another_kind() -> None:
    found = forecast(tried(request(gpu(gpus=2, memory=1))), [totals("n1", 1)], now=NOW)

    assert len(found.waiting) == 1
    assert not found.add_nodes
    assert found.waiting[0].room is None


def test_replicas_and_parallelism_say_how_many_pods_there_are() -> None:
    template = "template: {spec: {containers: []}}"
    text = "\n---\n".join(
        [
            f"{{kind: Deployment, metadata: {{name: a}}, spec: {{replicas: 3, {template}}}}}",
            f"{{kind: Job, metadata: {{name: b}}, spec: {{parallelism: 2, {template}}}}}",
            f"{{kind: CronJob, metadata: {{name: c}}, "
            f"spec: {{jobTemplate: {{spec: {{parallelism: 4, {template}}}}}}}}}",
            "{kind: Pod, metadata: {name: d}, spec: {containers: []}}",
        ]
    )

    assert [each.replicas for each in pods_in(text, "f")] == [3, 2, 4, 1]


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
    text = drawn(moves_text(DefragView(pod="default/new", plan=found, stays=())))
    room = f"none: {found.node} has room for it; `leasehold explain` says why it waits"
    assert [line.rstrip() for line in text.splitlines()] == [
        "pod         default/new",
        f"plan        {room}",
    ]


@pytest.mark.parametrize(("start_of", "fits"), [("other", False), ("new", True)])
def test_what_is_claimed_for_a_planned_start_is_free_for_its_own_pod_alone(
    start_of: str, fits: bool
) -> None:
    wanted = request(gpu(memory=30_000))
    claimed = (device("GPU-n2-0", 0), with_claim(NO_USE, NOW + 600))
    place = Placement(node=NodeName("n2"), shares=(share("GPU-n2-0", 0, memory_mib=30_000),))
    start = StoredStart(
        id=start_of,
        wanted=(reservation_for(pod_queued(start_of, wanted), (place,)),),
        at_once=({},),
        waits_for=(),
        at=NOW + 600,
        enforced=True,
    )
    placing = PlacingView(
        nodes=(HALVES[0], NodeTotals(node=ledger_node("n2", claimed), leases=())),
        preemptions=PreemptionState(starts=(start,)),
    )

    found = plan_moves(wanted, nodes_for(PodUid("new"), placing), BOTH, now=NOW)

    assert (found is not None) is fits
