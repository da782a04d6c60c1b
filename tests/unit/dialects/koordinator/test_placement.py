"""Koordinator's hints for the choice of devices, and where its pods are placed."""

import json
from typing import Any

import pytest

from shared.dialects.dialect import Rules
from shared.dialects.koordinator.requests import HINT, JOINT, PARTITION
from shared.model.devices.device import Device
from shared.model.errors import RequestError
from shared.model.leases.ledger import LedgerNode
from shared.model.requests.placement import Placement, Refusal
from shared.model.requests.request import PodRequest, TopologyScope
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
    bare = node("n1", device("GPU-1"), labels={})
    able = node("n2", device("GPU-2"))
    wanted = koordinated(koord(shared=1, ratio=50), labels={LABEL: "hami-core"})

    chosen = Cluster(bare, able).place(wanted)
    refused = Cluster(bare).place(wanted)

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


def hinted(hint: object, **amounts: int) -> PodRequest:
    notes = {HINT: json.dumps({"gpu": hint})}
    return koordinated(koord(**(amounts or {"shared": 2, "ratio": 200})), notes=notes)


@pytest.mark.parametrize(
    ("scope", "wanted"),
    [("PCIe", TopologyScope.PCIE), ("NUMANode", TopologyScope.NUMA), ("Node", TopologyScope.NODE)],
)
def test_a_required_scope_is_kept(scope: str, wanted: TopologyScope) -> None:
    assert hinted({"requiredTopologyScope": scope}).topology_scope is wanted


def test_a_selector_picks_devices_by_model() -> None:
    request = hinted(
        {
            "selector": {
                "matchLabels": {"node.koordinator.sh/gpu-vendor": "nvidia"},
                "matchExpressions": [
                    {
                        "key": "node.koordinator.sh/gpu-model",
                        "operator": "In",
                        "values": ["Tesla-T4", "A10"],
                    },
                    {
                        "key": "node.koordinator.sh/gpu-model",
                        "operator": "NotIn",
                        "values": ["A10"],
                    },
                    {"key": "rack", "operator": "DoesNotExist"},
                ],
            }
        }
    )

    assert request.selection.models == ("Tesla-T4", "A10")
    assert request.selection.not_models == ("A10",)


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        ({"requiredTopologyScope": "Device"}, "must be one of Node, NUMANode, PCIe, got 'Device'"),
        ({"exclusivePolicy": "PCIeLevel"}, "exclusivePolicy has no effect on a GPU"),
        ({"vfSelector": {"matchLabels": {}}}, "vfSelector has no effect"),
        ({"selector": {"matchLabels": {"rack": "7"}}}, "requires rack In 7, and no device"),
        ({"selector": {"matchExpressions": [{"key": "a"}]}}, "is not a label selector"),
        ({"selector": {"matchExpressions": [{"key": "a", "operator": "Is"}]}}, "operator of a"),
        ("PCIe", "must be a JSON object"),
    ],
)
def test_hints_that_are_not_supported_are_refused(hint: object, text: str) -> None:
    with pytest.raises(RequestError, match=text) as refused:
        hinted(hint)

    assert HINT in str(refused.value)


def test_a_strategy_for_other_devices_has_no_effect_on_a_gpu() -> None:
    assert hinted({"allocateStrategy": "RequestsAsCount"}) == hinted({})


@pytest.mark.parametrize("key", [HINT, JOINT, PARTITION])
def test_malformed_annotations_are_named(key: str) -> None:
    with pytest.raises(RequestError, match="is not JSON") as refused:
        koordinated(koord(shared=1, ratio=50), notes={key: "{gpu"})

    assert key in str(refused.value)


def test_a_joint_allocation_ignores_devices_that_are_not_requested() -> None:
    joint = {JOINT: '{"deviceTypes":["gpu","rdma"],"requiredScope":"SamePCIe"}'}
    near = {**koord(shared=1, ratio=100), "koordinator.sh/rdma": 1}

    assert koordinated(koord(shared=1, ratio=100), notes=joint).topology_scope is TopologyScope.NODE
    with pytest.raises(RequestError, match="SamePCIe of gpu and rdma is not supported"):
        koordinated(near, notes=joint)
    assert koordinated(near, notes={JOINT: '{"deviceTypes":["gpu","rdma"]}'}).prefer_links


def test_partitions_are_best_effort() -> None:
    restricted = {PARTITION: '{"allocatePolicy":"Restricted","ringBusBandwidth":"200Gi"}'}

    assert koordinated(koord(shared=2, ratio=200), notes={PARTITION: "{}"}).prefer_links
    with pytest.raises(RequestError, match="Restricted is not supported"):
        koordinated(koord(shared=2, core=200, ratio=200), notes=restricted)
    assert koordinated(koord(shared=1, ratio=50), notes=restricted).prefer_links
