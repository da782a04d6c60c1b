"""Parsing and placement of pods in Koordinator's dialect."""

import json
from typing import Any

from shared.dialects.dialect import Rules
from shared.dialects.koordinator.hints import HINT
from shared.model.device import Device
from shared.model.ledger import LedgerNode
from shared.model.placement import Placement, Refusal
from tests.support.build import device, ledger_node
from tests.support.dialects.builders import koord, koordinated
from tests.support.placer.placing import Cluster

GI = 1 << 30
LABEL = "koordinator.sh/gpu-isolation-provider"
ISOLATES = {LABEL: "HAMi-core"}
SERVED = ("koordinator.sh/gpu.shared",)
MOST = Rules(scoring_strategy="MostAllocated")


def node(name: str, *held: Device, labels: dict[str, str] | None = None) -> LedgerNode:
    return ledger_node(name, *held, served=SERVED, labels=ISOLATES if labels is None else labels)


def one_card(mib: int = 16384, **facts: Any) -> Cluster:
    return Cluster(node("n1", device(memory_mib=mib, **facts)))


def test_koordinator_17_bytes_and_ratio_never_overcommit_a_gpu() -> None:
    cluster = one_card()
    some_bytes = koordinated(koord(shared=1, memory=int(1.59 * GI)))
    ten_percent = koordinated(koord(shared=1, ratio=10))

    assert [cluster.indices(some_bytes) for _ in range(10)] == [[0]] * 10
    refused = cluster.place(ten_percent)

    assert isinstance(refused, Refusal)
    assert "Insufficient GPU memory" in refused.reason


def test_koordinator_19_a_node_without_the_label_is_skipped() -> None:
    bare, able = node("n1", device("GPU-1"), labels={}), node("n2", device("GPU-2"))
    wanted = koordinated(koord(shared=1, ratio=50), labels={LABEL: "hami-core"})

    chosen, refused = Cluster(bare, able).place(wanted), Cluster(bare).place(wanted)

    assert isinstance(chosen, Placement)
    assert chosen.node == "n2"
    assert isinstance(refused, Refusal)
    assert refused.counts == (("NodeAffinity", 1),)


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
    wanted = koordinated(koord(shared=1, ratio=1), notes={HINT: json.dumps(hint)})

    assert [Cluster(node("n1", *cards)).indices(wanted) for _ in range(3)] == [[1]] * 3
