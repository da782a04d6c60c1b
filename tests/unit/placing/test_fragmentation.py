"""The policy fragmentation: what is learned, what is weighed, and what is chosen."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from services.placer.rounds.decisions import DecisionContext
from shared.model.devices.device import DeviceUse
from shared.model.leases.ledger import LedgerNode
from shared.model.names import PodUid
from shared.model.requests.placement import Placement, Refusal
from shared.model.requests.request import DeviceOrder, DeviceSelection, NodeOrder, PodRequest
from shared.placing.explained import place_explained
from shared.placing.index.fragmentation import (
    CPU_PERCENT,
    SIZE_EXPONENT,
    TYPICAL_KINDS,
    UsableGpu,
    Workload,
    kind_of,
)
from shared.placing.index.node_index import NodeIndex
from shared.placing.placement import COMPARED_NODES
from tests.support.build import device, dice, gpu, ledger_node, pod_queued, request, use
from tests.support.effort import tries
from tests.support.placer.placing import index_of as mirror_index

GIB = 1 << 30


def pod(memory: int, gpus: int = 1, cpu: int = 1000, **fields: Any) -> PodRequest:
    """`memory` in thousandths of a device."""
    containers = (gpu("c", gpus, memory),) if gpus else ()
    return request(
        *containers,
        triggers=(),
        resources={"cpu": cpu, "memory": GIB, "pods": 1},
        node_order=NodeOrder.FRAGMENTATION,
        device_order=DeviceOrder.BINPACK,
        **fields,
    )


def node(
    name: str,
    *used: int,
    cpu: int = 64_000,
    model: str = "V100",
    watts: int = 0,
    cpu_used: int = 0,
) -> LedgerNode:
    """A node with devices of which so many thousandths are used."""
    return ledger_node(
        name,
        *(
            (
                device(
                    f"GPU-{name}-{n}",
                    n,
                    memory_mib=1000,
                    slots=100,
                    model=model,
                    power_limit_w=watts,
                ),
                use(mib, 0) if mib else DeviceUse(),
            )
            for n, mib in enumerate(used)
        ),
        used={"cpu": cpu_used},
        allocatable={"cpu": cpu, "memory": 256 * GIB, "pods": 110},
    )


def learned(*arrived: PodRequest) -> Workload:
    workload = Workload()
    for one in arrived:
        workload.learn(one)
    return workload


def index_of(workload: Workload, *nodes: LedgerNode) -> NodeIndex:
    index = mirror_index(*nodes)
    index.fragmentation.workload = workload
    return index


def chosen(wanted: PodRequest, index: NodeIndex, seed: int = 1) -> str:
    return candidates(wanted, index, seed)[0].node


def candidates(wanted: PodRequest, index: NodeIndex, seed: int = 1) -> tuple[Placement, ...]:
    answer = place_explained(wanted, index, dice(seed))
    assert not isinstance(answer, Refusal)
    return answer


def test_the_typical_kinds_are_the_frequent_ones_and_the_latest_count_more() -> None:
    workload = learned(*[pod(500)] * 20_000, *[pod(250)] * 20_000)

    frequent, less = workload.typical
    assert (frequent.kind.memory_units, less.kind.memory_units) == (250, 500)
    assert frequent.part > 0.75


def test_rare_kinds_and_pods_without_gpus_are_not_typical() -> None:
    workload = learned(*[pod(500)] * 300, *[pod(0, gpus=0)] * 300, *[pod(n + 1) for n in range(10)])

    assert [each.kind.memory_units for each in workload.typical] == [500]
    assert len(learned(*[pod(n % 900) for n in range(9_000)]).typical) == TYPICAL_KINDS


def test_containers_of_other_names_are_of_the_same_kind() -> None:
    one, other = pod(500), pod(500)
    [container] = other.containers

    assert kind_of(one) == kind_of(
        structs.replace(other, containers=(structs.replace(container, container="other"),))
    )


@settings(max_examples=tries(60), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 1000), st.integers(1, 4), st.integers(500, 9_000)), min_size=1
    ),
    st.integers(0, 60_000),
    st.lists(st.integers(0, 1000), min_size=1, max_size=8),
)
def test_the_value_is_that_of_the_plain_formula(
    kinds: list[tuple[int, int, int]], cpu: int, free: list[int]
) -> None:
    typical = learned(*(pod(part, gpus, cpu=each) for part, gpus, each in kinds)).typical
    weights = [part * (each.gpus * each.memory_units) ** SIZE_EXPONENT for each, part in typical]

    value = 0.0
    for (kind, frequency), weight in zip(typical, weights, strict=True):
        part = kind.memory_units
        gpus = kind.gpus
        fitting = [each for each in free if each >= part]
        shares = sum(each // part if gpus == 1 else 1 for each in fitting)
        pods = min(shares // gpus, cpu * CPU_PERCENT // 100 // kind.cpu)
        if pods:
            value += 0.5 * weight / sum(weights) * pods * gpus * part
            value += 0.5 * frequency * sum(fitting)

    usable = UsableGpu(typical, device(memory_mib=1000))
    assert usable.value(cpu, 256 * GIB, tuple(sorted(free))) == pytest.approx(value, abs=0.1)


def test_costs_of_nodes_that_changed_are_computed_again() -> None:
    workload = learned(*[pod(600)] * 50, *[pod(250, cpu=9_000)] * 20)
    index = index_of(workload, *(node(f"n{n}", 100 * n, 50 * n) for n in range(6)))
    fresh = NodeIndex(index.mirror)
    fresh.fragmentation.workload = workload

    for number in range(12):
        wanted = pod((300, 120)[number % 2])
        kept = candidates(wanted, index)[0]
        computed = candidates(wanted, fresh)[0]
        assert _costs(kept.weighed) == _costs(computed.weighed)
        index.mirror.reserve(PodUid(f"uid-{number}"), kept, wanted.resources)
        fresh = NodeIndex(index.mirror)
        fresh.fragmentation.workload = workload


def _costs(weighed: str) -> list[str]:
    return re.findall(r"-?[0-9.]+(?= on )", weighed)


def test_the_pod_goes_where_it_leaves_most_to_the_pods_that_usually_arrive() -> None:
    workload = learned(*[pod(600)] * 50)
    nodes = node("wasted", 600), node("useful", 400)

    assert chosen(pod(300), index_of(workload, *nodes)) == "wasted"
    assert chosen(pod(300), index_of(workload, *reversed(nodes))) == "wasted"


def test_pods_without_gpus_go_where_cpu_is_of_no_use_for_pods_with_gpus() -> None:
    workload = learned(*[pod(1000, cpu=8_000)] * 50)
    nodes = node("idle", 0, 0, cpu=20_000), node("full", 1000, 1000, cpu=20_000)

    assert chosen(pod(0, gpus=0, cpu=10_000), index_of(workload, *nodes)) == "full"


@pytest.mark.parametrize(
    ("policy", "wanted", "chosen_node"),
    [
        (NodeOrder.POWER, pod(1000), "t4"),
        (NodeOrder.FRAGMENTATION, pod(1000), "v100"),
        (NodeOrder.POWER, pod(400), "used-v100"),
        (NodeOrder.POWER, pod(0, gpus=0, cpu=8000), "used-v100"),
    ],
    ids=["a frugal model", "by fragmentation", "a GPU in use", "a CPU package in use"],
)
def test_with_the_policy_power_a_pod_goes_where_it_adds_the_fewest_watts(
    policy: NodeOrder, wanted: PodRequest, chosen_node: str
) -> None:
    usual = learned(
        *[pod(1000), pod(1000), pod(1000, selection=DeviceSelection(models=("T4",)))] * 8
    )
    nodes = [
        node("t4", 0, 0, model="T4", watts=70),
        node("v100", 0, 0, model="V100", watts=300),
        node("used-v100", 600, 1000, model="V100", watts=300, cpu_used=8000),
    ]

    placed = chosen(structs.replace(wanted, node_order=policy), index_of(usual, *nodes))

    assert placed == chosen_node


def test_a_node_without_devices_takes_pods_without_gpus_first() -> None:
    index = index_of(learned(*[pod(1000)] * 50), node("gpu", 0), node("plain"))

    assert chosen(pod(0, gpus=0), index) == "plain"


def test_idle_gpu_of_a_model_that_typical_pods_exclude_costs_nothing() -> None:
    only_a100 = DeviceSelection(models=("A100",))
    workload = learned(*[pod(1000, selection=only_a100)] * 50)
    nodes = node("a", 0, model="A100"), node("v", 0, model="V100")

    assert chosen(pod(1000), index_of(workload, *nodes)) == "v"


def test_the_same_random_numbers_lead_to_the_same_choice_and_at_most_16_nodes_are_compared() -> (
    None
):
    workload = learned(*[pod(n) for n in (200, 300, 500, 1000)] * 20)
    nodes = [node(f"n{n}", n * 7 % 1000, n * 13 % 1000) for n in range(200)]

    one = candidates(pod(300), index_of(workload, *nodes), 5)
    again = candidates(pod(300), index_of(workload, *nodes), 5)

    assert one == again
    assert len({placement.node for placement in one}) == 3
    assert f"compared {COMPARED_NODES} nodes" in one[0].weighed
    assert all(f"on {placement.node}" in one[0].weighed for placement in one)


def test_the_only_node_that_fits_is_found_and_a_pod_that_fits_nowhere_is_refused() -> None:
    full = [node(f"n{n}", 1000, cpu=64_000) for n in range(80)]
    index = index_of(learned(pod(500)), *full, node("last", 500))

    assert [chosen(pod(400), index, seed) for seed in range(3)] == ["last"] * 3
    refusal = place_explained(pod(600), index, dice(1))
    assert isinstance(refusal, Refusal)
    assert refusal.counts == (("InsufficientGpuMemory", 81),)


def test_each_pod_is_learned_once_though_it_is_offered_capacity_again() -> None:
    index = index_of(Workload(), node("n", 0))
    context = DecisionContext(index, dice(1))
    context.choose(pod_queued("a", pod(100)))
    for number in range(1, 50):
        context.choose(pod_queued("b", pod(900), requeue_number=number))

    assert [each.kind.memory_units for each in index.fragmentation.workload.typical] == [100]
