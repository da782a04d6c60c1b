"""Parsing and placement of pods in Koordinator's dialect."""

import json
from typing import Any

import pytest

from shared.dialects.dialect import Rules
from shared.dialects.koordinator.hints import HINT
from shared.model.device import Device
from shared.model.ledger import LedgerNode
from shared.model.placement import Placement, Refusal
from tests.support.build import device, devices, ledger_node
from tests.support.placer.placing import Cluster
from tests.unit.dialects.koordinator.test_requests import GI, LABEL, container, read

ISOLATES = {LABEL: "HAMi-core"}
SERVED = ("koordinator.sh/gpu.shared",)
MOST = Rules(scoring_strategy="MostAllocated")


def node(name: str, *held: Device, labels: dict[str, str] | None = None) -> LedgerNode:
    return ledger_node(name, *held, served=SERVED, labels=ISOLATES if labels is None else labels)


def one_card(mib: int = 16384, **facts: Any) -> Cluster:
    return Cluster(node("n1", device(memory_mib=mib, **facts)))


def test_koordinator_17_bytes_and_ratio_never_overcommit_a_gpu() -> None:
    cluster = one_card()
    some_bytes = read(container(shared=1, memory=int(1.59 * GI)))
    ten_percent = read(container(shared=1, ratio=10))

    assert [cluster.indices(some_bytes) for _ in range(10)] == [[0]] * 10
    refused = cluster.place(ten_percent)

    assert isinstance(refused, Refusal)
    assert "Insufficient GPU memory" in refused.reason


@pytest.mark.parametrize(("rules", "chosen"), [(Rules(), 1), (MOST, 0)])
def test_koordinator_18_the_strategy_chooses_the_emptier_or_the_fuller_of_two_used_gpus(
    rules: Rules, chosen: int
) -> None:
    cluster = Cluster(node("n1", *devices(2, memory_mib=10000)))
    for ratio, card in ((60, 0), (70, 1)):
        assert cluster.indices(read(container(shared=1, ratio=ratio))) == [card]
    cluster.end("uid-2")
    assert cluster.indices(read(container(shared=1, ratio=20))) == [1]

    assert cluster.indices(read(container(shared=1, ratio=10), rules=rules)) == [chosen]


@pytest.mark.parametrize(("rules", "chosen"), [(Rules(), "n2"), (MOST, "n1")])
def test_koordinator_18_the_strategy_chooses_the_emptier_or_the_fuller_of_two_nodes(
    rules: Rules, chosen: str
) -> None:
    cluster = Cluster(*(node(name, device(f"GPU-{name}")) for name in ("n1", "n2")))
    ratio = read(container(shared=1, ratio=40))
    first = cluster.place(ratio)
    assert isinstance(first, Placement)
    other = {"n1": "n2", "n2": "n1"}[first.node]

    second = cluster.place(read(container(shared=1, ratio=10), rules=rules))

    assert isinstance(second, Placement)
    assert second.node == (other if chosen == "n2" else first.node)


def test_koordinator_19_a_node_without_the_label_is_skipped() -> None:
    bare, able = node("n1", device("GPU-1"), labels={}), node("n2", device("GPU-2"))
    wanted = read(container(shared=1, ratio=50), labels={LABEL: "hami-core"})

    chosen, refused = Cluster(bare, able).place(wanted), Cluster(bare).place(wanted)

    assert isinstance(chosen, Placement)
    assert chosen.node == "n2"
    assert isinstance(refused, Refusal)
    assert refused.counts == (("NodeAffinity", 1),)


def test_whole_gpus_need_no_node_with_the_isolation_library() -> None:
    bare = node("n1", *devices(2), labels={})

    assert Cluster(bare).indices(read(container(shared=2, core=200, ratio=200))) == [0, 1]


def test_koordinator_20_an_unhealthy_gpu_gets_no_new_pod() -> None:
    cluster = Cluster(node("n1", device("GPU-0", 0, healthy=False), device("GPU-1", 1)))

    assert cluster.indices(read(container(shared=1, ratio=50))) == [1]
    assert cluster.indices(read(container(shared=2, ratio=100))) == []


def test_koordinator_7_two_containers_of_a_half_get_two_gpus() -> None:
    halves = [container(name, shared=1, core=50, ratio=50) for name in ("a", "b")]
    cluster = Cluster(node("n1", *devices(2)))

    assert sorted(cluster.indices(read(*halves))) == [0, 1]
    assert one_card().indices(read(*halves)) == []


def test_memory_only_shares_fit_where_all_compute_is_reserved() -> None:
    cluster = one_card()
    assert cluster.indices(read(container(shared=1, core=100, ratio=50))) == [0]

    assert cluster.indices(read(container(shared=1, memory=GI))) == [0]
    assert cluster.indices(read(container(shared=1, core=1, memory=GI))) == []


def test_a_whole_gpu_must_be_idle_and_is_exclusive() -> None:
    cluster = one_card()
    whole = read(container(shared=1, core=100, ratio=100))
    assert cluster.indices(whole) == [0]
    assert cluster.indices(read(container(shared=1, memory=1))) == []
    cluster.end("uid-1")
    assert cluster.indices(read(container(shared=1, memory=1))) == [0]

    assert cluster.indices(whole) == []


def test_sixteen_shares_fit_a_gpu_although_volcano_would_have_ten() -> None:
    cluster = one_card(slots=10)

    assert [cluster.indices(read(container(shared=1, ratio=6))) for _ in range(16)] == [[0]] * 16


def test_a_selector_keeps_a_pod_on_its_model() -> None:
    cards = device("GPU-0", 0, model="Tesla T4"), device("GPU-1", 1, model="NVIDIA A10")
    hint = {
        "gpu": {
            "selector": {
                "matchExpressions": [
                    {
                        "key": "node.koordinator.sh/gpu-model",
                        "operator": "NotIn",
                        "values": ["Tesla-T4"],
                    }
                ]
            }
        }
    }
    wanted = read(container(shared=1, ratio=1), annotations={HINT: json.dumps(hint)})

    assert [Cluster(node("n1", *cards)).indices(wanted) for _ in range(3)] == [[1]] * 3
