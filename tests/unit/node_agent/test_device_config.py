"""Volcano's ConfigMaps for its vGPU plugin."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from services.node_agent.device_config import REFRESH_S, DeviceConfigLoader
from services.node_agent.gpus.inventory import Gpu, SharingConfig, devices_of, mode_warnings
from services.node_agent.mig.layouts import KNOWN_GEOMETRIES
from services.node_agent.settings import AgentSettings
from services.node_agent.views.advertisement import advertisement_of
from shared.dialects import DIALECTS
from shared.dialects.advertised import Strategy
from shared.dialects.volcano.device_config import parse_device_config
from shared.kubernetes.errors import ErrorResponse, NotFoundError, UnreachableError
from shared.kubernetes.types import ObjectMeta
from shared.model.devices.device import DeviceMode
from shared.model.errors import RequestError
from shared.model.names import NodeName
from simcluster.node_agent.gpus import SimulatedGpus
from tests.support.clock import FakeClock
from tests.support.node_agent.agent import healthy_counts
from tests.support.node_agent.node import node_of
from tests.unit.dialects.volcano.test_device_config import NODE, OF_NODES, shipped


def test_item_50_a_missing_factor_means_1() -> None:
    document = shipped()
    del document["nvidia"]["gpuMemoryFactor"]

    sharing = SharingConfig().merged(
        parse_device_config(document, None, NODE), split=None, unit=None
    )

    assert sharing.unit_mib == 1


KEYS = st.sampled_from(
    [
        *("nvidia", "deviceSplitCount", "gpuMemoryFactor", "knownMigGeometries", "models"),
        *("allowedGeometries", "group", "geometries", "name", "memory", "count", "nodeconfig"),
        *("operatingmode", "devicesplitcount", "filterdevices", "uuid", "deviceCoreScaling"),
        NODE,
    ]
)
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 12) | st.floats() | KEYS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=25,
)


@given(DOCUMENTS, DOCUMENTS)
def test_any_document_is_parsed_without_an_error(device: object, node: object) -> None:
    config = parse_device_config(
        {"nvidia": device}, {"nodeconfig": [{"name": NODE, "operatingmode": node}, node]}, NODE
    )

    sharing = SharingConfig().merged(config, split=None, unit=None)
    assert sharing.split_count >= 1
    assert sharing.unit_mib >= 1
    parse_device_config(device, node, NODE)


def test_flags_override_the_common_file_and_the_nodes_own_entry_overrides_both() -> None:
    of_all = parse_device_config(shipped(deviceSplitCount=5, gpuMemoryFactor=10), None, NODE)
    own = parse_device_config(shipped(deviceSplitCount=5), OF_NODES, NODE)

    assert SharingConfig().merged(of_all, split=None, unit=None).split_count == 5
    assert SharingConfig().merged(of_all, split=None, unit=None).unit_mib == 10
    assert SharingConfig().merged(of_all, split=8, unit=100).split_count == 8
    assert SharingConfig().merged(of_all, split=8, unit=100).unit_mib == 100
    assert SharingConfig().merged(own, split=8, unit=None).split_count == 4
    assert SharingConfig().merged(of_all, split=None, unit=None).geometries == (
        *of_all.geometries,
        *KNOWN_GEOMETRIES,
    )


async def found(layout: str) -> tuple[Gpu, ...]:
    return await SimulatedGpus(NodeName(NODE), layout).discover()


async def test_a_node_has_devices_of_both_modes(tmp_path: Path) -> None:
    gpus = await found("1xT4+1xA100-40GB+1xA100-40GB:mig")

    devices = devices_of(gpus, SharingConfig(split_count=5))

    assert [str(device.mode) for device in devices] == ["hami-core", "hami-core", "mig"]
    assert [device.slots for device in devices] == [5, 5, 7], "an ID for every position"
    assert [len(device.layouts) for device in devices] == [0, 0, 4]


async def test_a_device_in_mig_mode_serves_no_memory_units() -> None:
    gpus = await found("1xT4+1xA100-40GB:mig")

    shown = advertisement_of(DIALECTS.values(), devices_of(gpus, SharingConfig()), Strategy.AUTO)

    assert shown.node_status["volcano.sh/gpu-memory"] == 15360
    assert shown.node_status["volcano.sh/gpu-number"] == 1
    assert healthy_counts(shown)["volcano.sh/vgpu-number"] == 20


async def test_hidden_devices_are_not_served() -> None:
    gpus = await found("3xT4")
    division = SharingConfig(hidden=frozenset({gpus[0].uuid, "2"}))

    assert [device.index for device in devices_of(gpus, division)] == [1]


async def test_a_mode_mismatch_is_a_warning_with_a_remedy() -> None:
    gpus = await found("1xA100-40GB+1xT4+1xA100-40GB:mig")

    notes = mode_warnings(gpus, SharingConfig(expected_mode=DeviceMode.MIG))

    assert "GPU 0 (NVIDIA A100-SXM4-40GB) is in hami-core mode" in notes[0]
    assert "nvidia-smi -i 0 -mig 1" in notes[0]
    assert "the mode of the hardware applies" in notes[1]
    assert len(notes) == 2
    assert mode_warnings(gpus, SharingConfig()) == ()


async def test_a_pending_mig_mode_is_a_warning() -> None:
    (gpu,) = await found("1xA100-40GB")
    assert gpu.mig is not None
    pending = replace(gpu, mig=replace(gpu.mig, pending=True))

    assert mode_warnings([pending], SharingConfig()) == (
        "GPU 0 (NVIDIA A100-SXM4-40GB): MIG is turned on by the next reset of the GPU",
    )


class FakeConfigMaps:
    """An API server with ConfigMaps, or one that is away."""

    def __init__(self, **texts: str) -> None:
        self.texts = texts
        self.away = False
        self.reads: list[str] = []

    async def read(self, path: str, kind: type[Any]) -> Any:
        self.reads.append(path)
        if self.away:
            raise UnreachableError("GET", path, "no answer")
        key = "device-config.yaml" if "device-config" in path else "config.json"
        for namespace, text in self.texts.items():
            if f"/{namespace.replace('_', '-')}/" in path and key == "device-config.yaml":
                return kind(data={key: text})
        raise NotFoundError(
            ErrorResponse(method="GET", path=path, code=404, reason="NotFound", message="none")
        )


def configuring(tmp_path: Path, maps: Any, clock: FakeClock, **changes: Any) -> DeviceConfigLoader:
    node = node_of(name=NodeName(NODE), kubernetes=maps, clock=clock)
    return DeviceConfigLoader(node, AgentSettings(state_dir=tmp_path, **changes))


def text(**changes: Any) -> str:
    return yaml.safe_dump(shipped(**changes))


async def test_the_config_map_of_kube_system_comes_before_that_of_volcano_system(
    tmp_path: Path,
) -> None:
    clock = FakeClock()
    both = FakeConfigMaps(
        kube_system=text(deviceSplitCount=3), volcano_system=text(deviceSplitCount=4)
    )
    other = FakeConfigMaps(volcano_system=text(deviceSplitCount=4))

    for folder, maps, count in (("a", both, 3), ("b", other, 4), ("c", FakeConfigMaps(), 10)):
        (tmp_path / folder).mkdir()
        config = configuring(tmp_path / folder, maps, clock)
        assert (await config.load()).split_count == count


async def test_a_restarted_agent_serves_as_before_until_the_api_server_has_answered(
    tmp_path: Path,
) -> None:
    """A kubelet refuses pods while no plugin is registered, and the API server may be slow."""
    clock = FakeClock()
    maps = FakeConfigMaps(kube_system=text(deviceSplitCount=3))
    await configuring(tmp_path, maps, clock).load()
    maps.texts["kube_system"] = text(deviceSplitCount=6)
    maps.reads.clear()
    restarted = configuring(tmp_path, maps, clock)

    first = await restarted.load()
    reads = list(maps.reads)
    second = await restarted.load()

    assert (first.split_count, second.split_count) == (3, 6)
    assert not reads


@pytest.mark.parametrize("damaged", ["", "[]", '{"a": 5}', "[" * 100_000])
async def test_a_damaged_cache_is_no_cache(tmp_path: Path, damaged: str) -> None:
    (tmp_path / "device-config.json").write_text(damaged)
    maps = FakeConfigMaps(kube_system=text(deviceSplitCount=3))

    assert (await configuring(tmp_path, maps, FakeClock()).load()).split_count == 3


async def test_a_change_is_applied_within_a_minute(tmp_path: Path) -> None:
    clock = FakeClock()
    maps = FakeConfigMaps(kube_system=text(deviceSplitCount=3))
    config = configuring(tmp_path, maps, clock)
    await config.load()
    maps.texts["kube_system"] = text(deviceSplitCount=6)

    before = await config.load()
    reads = len(maps.reads)
    clock.advance(REFRESH_S)
    after = await config.load()

    assert (before.split_count, after.split_count) == (3, 6)
    assert reads == 4


async def test_without_the_api_server_the_previous_configuration_applies(tmp_path: Path) -> None:
    clock = FakeClock()
    maps = FakeConfigMaps(kube_system=text(deviceSplitCount=3))
    running = configuring(tmp_path, maps, clock)
    await running.load()
    maps.away = True
    clock.advance(REFRESH_S)

    assert (await running.load()).split_count == 3
    assert (await configuring(tmp_path, maps, clock).load()).split_count == 3


async def test_files_take_precedence_over_config_maps_and_a_missing_one_is_fatal(
    tmp_path: Path,
) -> None:
    device = tmp_path / "device.yaml"
    node = tmp_path / "config.json"
    device.write_text(text(deviceSplitCount=5))
    node.write_text(json.dumps(OF_NODES))
    plugin = tmp_path / "plugin.yaml"
    plugin.write_text("version: v1")
    maps = FakeConfigMaps(kube_system=text(deviceSplitCount=3))

    files = {"device_config": device, "node_config": node, "plugin_config": plugin}
    from_files = configuring(tmp_path, maps, FakeClock(), **files)
    missing = configuring(tmp_path, maps, FakeClock(), device_config=tmp_path / "none")

    assert (await from_files.load()).split_count == 4
    assert maps.reads == []
    with pytest.raises(RequestError, match="none cannot be read"):
        await missing.load()


async def test_invalid_yaml_is_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = configuring(tmp_path, FakeConfigMaps(kube_system="nvidia: ["), FakeClock())

    assert (await config.load()).split_count == 10
    assert "device-config.yaml is ignored, its syntax is invalid" in caplog.text


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        ("nvidia: [", "its syntax is invalid"),
        ("nvidia: {deviceSplitCount: 3}\nnvidia: {deviceSplitCount: 4}", "'nvidia' is there twice"),
        ("nvidia: {deviceSplitCount: -4}", "deviceSplitCount is -4"),
        ("nvidia: {deviceSplitCount: 99999999999}", "it must be a whole number from 1 to"),
        ("- nvidia", "is not a mapping"),
    ],
)
async def test_an_invalid_config_map_leaves_the_last_valid_one_in_force_also_after_a_restart(
    broken: str, error: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    maps = FakeConfigMaps(kube_system=text(deviceSplitCount=3))
    running = configuring(tmp_path, maps, clock)
    await running.load()
    maps.texts["kube_system"] = broken
    clock.advance(REFRESH_S)

    restarted = configuring(tmp_path, maps, clock)

    counts = [(await config.load()).split_count for config in (running, restarted, restarted)]

    assert counts == [3, 3, 3]
    assert error in caplog.text
    assert "its last valid version is in force" in caplog.text
    assert shown_errors() == 1
    maps.texts["kube_system"] = text(deviceSplitCount=4)
    clock.advance(REFRESH_S)
    assert (await running.load()).split_count == 4
    assert shown_errors() == 0


def shown_errors() -> float | None:
    labels = {"config": "volcano-vgpu-device-config"}
    return REGISTRY.get_sample_value("leasehold_agent_config_errors", labels)


class FakePluginConfigs:
    """An API server with a ConfigMap of NVIDIA's plugin, and a node with or without a label."""

    def __init__(self, **configs: str) -> None:
        self.configs = configs
        self.label = ""

    async def read(self, path: str, kind: type[Any]) -> Any:
        if path == f"/api/v1/nodes/{NODE}":
            labels = {"nvidia.com/device-plugin.config": self.label} if self.label else {}
            return kind(metadata=ObjectMeta(name=NODE, labels=labels))
        if path.endswith("/leasehold-agents/configmaps/nvidia-plugin-configs") and self.configs:
            return kind(data=self.configs)
        raise NotFoundError(
            ErrorResponse(method="GET", path=path, code=404, reason="NotFound", message="none")
        )


def slices(replicas: object, method: str = "timeSlicing") -> str:
    resource = {"name": "nvidia.com/gpu", "replicas": replicas}
    return yaml.safe_dump({"version": "v1", "sharing": {method: {"resources": [resource]}}})


async def test_the_label_of_the_node_chooses_its_replicas_and_a_change_is_applied(
    tmp_path: Path,
) -> None:
    clock = FakeClock()
    maps = FakePluginConfigs(default="version: v1", quarters=slices(4), servers=slices(10, "mps"))
    config = configuring(tmp_path, maps, clock)

    found = [(await config.load()).replicas]
    for label in ("quarters", "servers", ""):
        maps.label = label
        clock.advance(REFRESH_S)
        found.append((await config.load()).replicas)

    assert [replicas and replicas.number for replicas in found] == [None, 4, 10, None]


async def test_a_label_that_names_no_configuration_leaves_the_last_in_force(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    maps = FakePluginConfigs(quarters=slices(4), servers=slices(10, "mps"))
    maps.label = "quarters"
    config = configuring(tmp_path, maps, clock)
    await config.load()
    maps.label = "quarter"
    clock.advance(REFRESH_S)

    replicas = (await config.load()).replicas

    assert replicas is not None
    assert replicas.number == 4
    assert "has no such key: its keys are quarters, servers" in caplog.text


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        (slices(1), "must be a whole number from 2 to 4096, got 1"),
        (slices(101, "mps"), "a client would get 0 % of the compute"),
        ("version: [", "its syntax is invalid"),
        (slices(2).replace("nvidia.com/gpu", "nvidia.com/mig-1g.5gb"), "instances of MIG have"),
    ],
)
async def test_an_invalid_configuration_of_replicas_leaves_the_last_in_force(
    broken: str, error: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    maps = FakePluginConfigs(default=slices(4))
    running = configuring(tmp_path, maps, clock)
    await running.load()
    maps.configs["default"] = broken
    clock.advance(REFRESH_S)
    restarted = configuring(tmp_path, maps, clock)

    for config in (running, restarted, restarted):
        replicas = (await config.load()).replicas
        assert replicas is not None
        assert replicas.number == 4
    assert error in caplog.text


async def test_a_file_of_replicas_takes_precedence_over_the_config_map(tmp_path: Path) -> None:
    file = tmp_path / "plugin.yaml"
    file.write_text(slices(3))
    maps = FakePluginConfigs(default=slices(4))

    config = configuring(tmp_path, maps, FakeClock(), plugin_config=file)

    replicas = (await config.load()).replicas
    assert replicas is not None
    assert replicas.number == 3
