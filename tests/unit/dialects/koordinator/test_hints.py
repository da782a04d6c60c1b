"""Koordinator's hints for the choice of devices: applied, ignored or refused."""

import json

import pytest

from shared.dialects.koordinator.hints import HINT, JOINT, PARTITION
from shared.model.errors import RequestError
from shared.model.request import PodRequest, TopologyScope
from tests.support.dialects.builders import koord, koordinated


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
