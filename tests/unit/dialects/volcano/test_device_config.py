"""Parsing of Volcano's two ConfigMaps for its vGPU device plugin."""

from typing import Any

import pytest
import yaml

from services.node_agent.mig.layouts import KNOWN_GEOMETRIES
from shared.dialects.volcano.device_config import parse_device_config
from shared.model.devices.device import DeviceMode

SHIPPED = """
nvidia:
  resourceCountName: volcano.sh/vgpu-number
  resourceMemoryName: volcano.sh/vgpu-memory
  resourceMemoryPercentageName: volcano.sh/vgpu-memory-percentage
  resourceCoreName: volcano.sh/vgpu-cores
  overwriteEnv: false
  defaultMemory: 0
  defaultCores: 0
  defaultGPUNum: 1
  deviceSplitCount: 10
  deviceMemoryScaling: 1
  deviceCoreScaling: 1
  gpuMemoryFactor: 1
  knownMigGeometries:
  - models: ["A30"]
    allowedGeometries:
    - group: group1
      geometries:
      - {name: 1g.6gb, memory: 6144, count: 4}
    - group: group2
      geometries:
      - {name: 2g.12gb, memory: 12288, count: 2}
    - group: group3
      geometries:
      - {name: 4g.24gb, memory: 24576, count: 1}
"""
OF_NODES = {
    "nodeconfig": [
        {
            "name": "node-0",
            "operatingmode": "mig",
            "devicememoryscaling": 1,
            "devicecorescaling": 1,
            "devicesplitcount": 4,
            "migstrategy": "none",
            "filterdevices": {"uuid": ["GPU-x"], "index": [2]},
        },
        {"name": "node-1", "devicesplitcount": 7},
    ]
}
NODE = "node-0"


def shipped(**changes: Any) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(SHIPPED)
    document["nvidia"] |= changes
    return document


def test_item_50_both_files_with_the_shipped_values_are_accepted_without_a_warning() -> None:
    config = parse_device_config(shipped(), OF_NODES, NODE)

    assert config.warnings == ()
    assert (config.split_count, config.unit_mib) == (10, 1)
    assert config.geometries == KNOWN_GEOMETRIES[:1]
    assert config.node_split_count == 4
    assert config.mode is DeviceMode.MIG
    assert config.excluded_devices == {"GPU-x", "2"}


@pytest.mark.parametrize(
    ("document", "nodes", "warning"),
    [
        (shipped(gpuMemoryFaktor=10), None, "'gpuMemoryFaktor' that nothing reads; did you mean "
         "gpuMemoryFactor?"),
        (shipped(DeviceSplitCount=10), None, "did you mean deviceSplitCount?"),
        (shipped(zzz=1), None, "section nvidia has a key 'zzz' that nothing reads"),
        (shipped(gpuMemoryFactor=0), None, "gpuMemoryFactor is 0: it must be a whole number"),
        (shipped(deviceSplitCount="ten"), None, "deviceSplitCount is 'ten'"),
        (shipped(deviceCoreScaling=2), None, "deviceCoreScaling is 2, which has no effect"),
        (shipped(resourceCountName="a/b"), None, "serves it as volcano.sh/vgpu-number"),
        (shipped(knownMigGeometries="A30"), None, "knownMigGeometries is not a list"),
        ([], None, "the device configuration is not a mapping"),
        (None, {"nodeconfigs": []}, "did you mean nodeconfig?"),
        (None, {"nodeconfig": [{"name": NODE, "operatingMode": "mig"}]},
         "did you mean operatingmode?"),
        (None, {"nodeconfig": [{"name": NODE, "operatingmode": "mps"}]},
         "operatingmode is 'mps': it must be hami-core or mig"),
        (None, {"nodeconfig": [{"name": NODE, "filterdevices": {"uuids": []}}]},
         "did you mean uuid?"),
    ],
)  # fmt: skip
def test_item_50_unknown_and_invalid_values_are_reported_by_name(
    document: object, nodes: object, warning: str
) -> None:
    config = parse_device_config(document, nodes, NODE)

    assert any(warning in text for text in (*config.warnings, *config.errors)), config


@pytest.mark.parametrize("group", ["", "a-b", "a[", "a]", "a,b", "a:b", "a;b"])
def test_a_group_whose_name_would_break_annotations_is_left_out(group: str) -> None:
    profile = {"name": "1g.6gb", "memory": 6144, "count": 4}
    tables = [
        {
            "models": ["A30"],
            "allowedGeometries": [
                {"group": group, "geometries": [profile]},
                {"group": "good", "geometries": [profile]},
            ],
        }
    ]

    config = parse_device_config({"nvidia": {"knownMigGeometries": tables}}, None, NODE)

    assert [layout.name for layout in config.geometries[0].layouts] == ["good"]
    assert "a group needs a name" in config.errors[0]


@pytest.mark.parametrize(
    "profile",
    [
        {"name": "", "memory": 1, "count": 1},
        {"name": "1g.6gb", "memory": 0, "count": 1},
        {"name": "1g.6gb", "memory": 6144, "count": -1},
        {"name": "1g.6gb", "memory": 6144},
    ],
)
def test_a_group_with_an_impossible_instance_is_left_out(profile: dict[str, object]) -> None:
    group = {"group": "g", "geometries": [{"name": "2g.12gb", "memory": 1, "count": 1}, profile]}
    tables = [{"models": ["A30"], "allowedGeometries": [group]}]

    config = parse_device_config({"nvidia": {"knownMigGeometries": tables}}, None, NODE)

    assert config.geometries == ()
    assert "group g is ignored" in config.errors[-1]


def nodes(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"nodeconfig": [{"name": NODE, **entry} for entry in entries]}


def test_several_entries_for_a_node_are_merged_field_by_field() -> None:
    config = parse_device_config(
        None,
        nodes(
            {"devicesplitcount": 3, "filterdevices": {"uuid": ["GPU-x"]}},
            {"operatingmode": "mig", "devicesplitcount": 5},
            {},
        ),
        NODE,
    )

    assert (config.node_split_count, config.mode) == (5, DeviceMode.MIG)
    assert config.excluded_devices == {"GPU-x"}
    assert config.errors == ()
    (warning,) = config.warnings
    assert "nodeconfig[1].devicesplitcount replaces that of an earlier entry" in warning


def test_a_name_that_is_a_pattern_is_not_applied_with_a_warning() -> None:
    config = parse_device_config(
        None, {"nodeconfig": [{"name": "node-*", "devicesplitcount": 3}]}, NODE
    )

    assert config.node_split_count is None
    assert "is compared as it is, and is no pattern" in config.warnings[0]


@pytest.mark.parametrize(
    ("document", "error"),
    [
        (shipped(deviceSplitCount=10**9), "deviceSplitCount is 1000000000: it must be a whole"),
        (shipped(gpuMemoryFactor=2**40), "gpuMemoryFactor is"),
        (shipped(deviceSplitCount=float("nan")), "deviceSplitCount is nan"),
        (shipped(deviceSplitCount="9" * 1_000_000), "deviceSplitCount is '999"),
        (shipped(knownMigGeometries=[{}] * 10_000), "has 10000 entries; at most 256 are read"),
    ],
)
def test_what_is_out_of_range_is_an_error_in_few_words(document: Any, error: str) -> None:
    config = parse_device_config(document, None, NODE)

    assert any(error in text for text in config.errors), config.errors
    assert all(len(text) < 300 for text in config.errors)
