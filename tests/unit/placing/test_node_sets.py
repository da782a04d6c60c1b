"""The sets of nodes that fit, against a look at every node; and the rule of choosing among them."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.model.leases.ledger import LedgerNode
from shared.model.names import NodeName, PodUid
from shared.model.requests.placement import Refusal
from shared.model.requests.request import (
    DeviceSelection,
    NodeOrder,
    NodeRequirements,
    NodeTerm,
    PodRequest,
)
from shared.placing.choice.device_choice import choose_devices
from shared.placing.choice.device_refusals import explain_no_devices
from shared.placing.explained import place_explained
from shared.placing.index import threshold_column
from shared.placing.index.node_index import NodeIndex
from shared.placing.index.threshold_column import (
    NodePositions,
    ThresholdColumn,
    positions_in,
)
from shared.placing.mirror.cluster_mirror import ClusterMirror
from shared.placing.mirror.node_mirror import MirroredNode
from shared.placing.node_filters import check_all
from tests.support.build import device, dice, gpu, ledger_node, request, use
from tests.support.effort import tries
from tests.support.placer.placing import index_of
from tests.unit.placer.test_placement_property import clusters, requests


def _reason(wanted: PodRequest, node: MirroredNode) -> tuple[str, str] | None:
    failure = check_all(wanted, node.facts, node.free_resources, node.serving)
    if failure is None and wanted.containers and choose_devices(wanted, node) is None:
        failure = explain_no_devices(wanted, node)
    return None if failure is None else (failure.code, failure.message)


def _assert_sets_are_those_of_a_scan(wanted: PodRequest, index: NodeIndex) -> None:
    fitting, excluded = index.sets.split(wanted)

    assert index.sets.split(wanted, explained=False)[0] == fitting
    found = Counter[tuple[str, str] | None]({None: fitting.bit_count()})
    found.update({reason: nodes.bit_count() for reason, nodes in excluded.items()})
    assert +found == Counter(_reason(wanted, node) for node in index.mirror.nodes.values())


simple_requests = st.builds(
    lambda gpus, memory, cores, slotted, cpu, selection: request(
        gpu("c", gpus, memory, cores_percent=cores, slotted=slotted),
        selection=selection,
        triggers=(),
        resources={"cpu": cpu, "pods": 1},
    ),
    st.integers(1, 4),
    st.sampled_from([1, 7, 14, 30, 56, 98]),
    st.sampled_from([0, 5, 30, 35, 70, 100]),
    st.booleans(),
    st.sampled_from([0, 100, 200]),
    st.sampled_from(
        [
            DeviceSelection(),
            DeviceSelection(models=("Tesla-T4",)),
            DeviceSelection(not_models=("A100",)),
            DeviceSelection(types=("a100",), not_uuids=("GPU-n0-0",)),
        ]
    ),
)


@settings(max_examples=tries(80), deadline=None)
@given(clusters(), st.lists(st.one_of(requests(), simple_requests), min_size=1, max_size=5))
def test_nodes_are_divided_by_reason_as_by_a_look_at_each(
    nodes: list[LedgerNode], wanted: list[PodRequest]
) -> None:
    index = index_of(*nodes)
    mirror = index.mirror

    for number, one in enumerate(wanted):
        _assert_sets_are_those_of_a_scan(one, index)
        answer = place_explained(one, index, dice(number))
        if not isinstance(answer, Refusal):
            mirror.reserve(PodUid(f"uid-{number}"), answer[0], one.resources)
        _assert_sets_are_those_of_a_scan(one, index)


@pytest.mark.parametrize("cores", [1, 9, 10, 35, 100])
def test_cores_decide_to_the_percent(cores: int) -> None:
    enough = [(device(f"GPU-{n}", n), use(10, 100 - cores)) for n in range(2)]
    too_few = [(device(f"GPU-{n}", n), use(10, 101 - cores)) for n in range(2, 4)]
    mirror = index_of(ledger_node("n1", *enough), ledger_node("n2", *too_few)).mirror

    for gpus in (1, 2):
        wanted = request(gpu("c", gpus, 1, cores_percent=cores), triggers=())
        _assert_sets_are_those_of_a_scan(wanted, NodeIndex(mirror))


@settings(max_examples=tries(60), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.one_of(st.none(), st.integers(0, 9)), st.integers(-1, 10)),
        max_size=30,
    )
)
def test_a_column_follows_nodes_that_change_come_and_go(steps: list[tuple[Any, ...]]) -> None:
    mirror = ClusterMirror()
    positions = NodePositions(mirror)
    column = ThresholdColumn(
        positions, lambda node: node.free_resources.get("cpu", 0), mirror.changes
    )

    for number, (name, cpu, threshold) in enumerate(steps):
        if cpu is None:
            mirror.remove_node(NodeName(f"n{name}"))
        else:
            mirror.put_node(ledger_node(f"n{name}", allocatable={"cpu": cpu}, version=number))
        positions.catch_up()
        column.catch_up()
        found = column.at_least(threshold) & positions.all
        assert {
            node.name for at, node in enumerate(positions.nodes) if node and found >> at & 1
        } == {
            node.name
            for node in mirror.nodes.values()
            if node.free_resources.get("cpu", 0) >= threshold
        }


@settings(max_examples=tries(25), deadline=None)
@given(
    st.lists(st.integers(0, 60), min_size=200, max_size=300),
    st.lists(st.tuples(st.integers(0, 199), st.integers(0, 60), st.integers(-1, 62)), max_size=60),
)
def test_a_column_answers_more_thresholds_than_it_keeps(
    amounts: list[int], steps: list[tuple[int, int, int]]
) -> None:
    nodes = (ledger_node(f"n{n}", allocatable={"cpu": cpu}) for n, cpu in enumerate(amounts))
    mirror = index_of(*nodes).mirror
    positions = NodePositions(mirror)
    positions.catch_up()
    column = ThresholdColumn(
        positions, lambda node: node.free_resources.get("cpu", 0), mirror.changes
    )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threshold_column, "CACHED_THRESHOLDS", 6)
        for number, (changed, cpu, threshold) in enumerate(steps):
            amounts[changed] = cpu
            mirror.put_node(ledger_node(f"n{changed}", allocatable={"cpu": cpu}, version=number))
            column.catch_up()
            assert positions_in(column.at_least(threshold), len(amounts)) == [
                at for at, amount in enumerate(amounts) if amount >= threshold
            ]


def _plain_rank(order: NodeOrder, node: LedgerNode) -> tuple[int, ...]:
    """How the documentation orders nodes with one device each: the first has the least."""
    [(card, used)] = node.devices
    free = card.memory_mib - used.memory_mib
    return (used.memory_mib, -free) if order is NodeOrder.SPREAD else (free, -used.memory_mib)


LIKES = NodeRequirements(preferred=((5, (NodeTerm(key="zone", operator="Exists"),)),))


@pytest.mark.parametrize("needs", [NodeRequirements(), LIKES], ids=["quick", "exact"])
@pytest.mark.parametrize("order", [NodeOrder.BINPACK, NodeOrder.SPREAD])
@settings(max_examples=tries(60), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.booleans()), min_size=1, max_size=14),
    st.integers(1, 32),
)
def test_the_first_choice_is_that_of_the_plain_rule(
    order: NodeOrder, needs: NodeRequirements, used: list[tuple[int, bool]], gib: int
) -> None:
    """With fewer than 16 nodes only equal nodes tie; the exact path also excludes nodes by cpu."""
    used = [(hundreds, is_full and needs is LIKES) for hundreds, is_full in used]
    nodes = [
        ledger_node(
            f"n{number}",
            (device(f"GPU-{number}"), use(100 * hundreds)),
            used={"cpu": 64_000} if is_full else {},
        )
        for number, (hundreds, is_full) in enumerate(used)
    ]
    wanted = request(gpu(memory=gib << 10), node_order=order, node_requirements=needs)
    rooms = [
        node
        for node, (hundreds, is_full) in zip(nodes, used, strict=True)
        if not is_full and 100 * hundreds + (gib << 10) <= 32_768
    ]

    answer = place_explained(wanted, index_of(*nodes), dice(1))

    if not rooms:
        assert isinstance(answer, Refusal)
        return
    assert not isinstance(answer, Refusal)
    [chosen] = [node for node in nodes if node.facts.name == answer[0].node]
    best = min(_plain_rank(order, node) for node in rooms)
    if order is NodeOrder.BINPACK:
        assert _plain_rank(order, chosen) == best
    else:
        assert 62 * chosen.devices[0][1].memory_mib // 32_768 == 62 * best[0] // 32_768


def test_a_request_for_more_gpus_than_are_healthy_names_the_step_that_excludes_too_many() -> None:
    node = ledger_node(
        "n1",
        device("GPU-0", 0, healthy=False),
        (device("GPU-1", 1), use(32_000)),
        (device("GPU-2", 2), use(0, 90)),
    )
    index = index_of(node)

    def code(gpus: int, cores: int = 50) -> str:
        answer = place_explained(request(gpu("c", gpus, 1000, cores_percent=cores)), index, dice(1))
        assert isinstance(answer, Refusal)
        return answer.counts[0][0]

    assert code(1) == "InsufficientGpuCores"
    assert code(2) == "InsufficientGpuMemory"
    assert code(3) == "GpuUnhealthy"
    assert code(4) == "NotEnoughGpus"
