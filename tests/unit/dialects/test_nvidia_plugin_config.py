"""The configuration of NVIDIA's device plugin: what it stands for, and what is wrong with it."""

from dataclasses import replace
from typing import Any

import pytest
import yaml

from services.node_agent.views.advertisement import advertisement_of
from shared.dialects import DIALECTS
from shared.dialects.dialect import ContainerManifest, PodManifest, Rules
from shared.dialects.nvidia.plugin_config import (
    NodeSharing,
    config_for,
    named_configs,
    parse_sharing,
    replicas_of,
)
from shared.dialects.nvidia.sharing_selectors import find_sharing_selectors
from shared.dialects.pod_requests import parse_pod_request
from shared.model.devices.device import DeviceMode, required_memory_mib
from shared.model.devices.replicas import Replicas
from shared.model.errors import RequestError
from shared.model.names import DeviceUuid, Namespace
from shared.model.requests.request import PodRequest
from tests.support.build import device

GPU = "nvidia.com/gpu"
MIG = "nvidia.com/mig-1g.5gb"
MEMORY = "nvidia.com/gpumem"


def written(method: str = "timeSlicing", *, replicas: Any = 10, **fields: Any) -> dict[str, Any]:
    of_resource = {key: fields.pop(key) for key in ("name", "rename", "devices") if key in fields}
    resource = {"name": GPU, "replicas": replicas} | of_resource
    return {"version": "v1", "sharing": {method: {"resources": [resource], **fields}}}


def requested(limits: dict[str, int]) -> PodRequest:
    container = ContainerManifest(name="main", limits=limits)
    pod = PodManifest(namespace=Namespace("ns"), containers=(container,))
    return parse_pod_request(pod, Rules())


def parsed(document: object) -> NodeSharing:
    """Parse a file as it is written."""
    return parse_sharing(yaml.safe_load(yaml.safe_dump(document)))


STRATEGY, REPLICAS, PRODUCT = (
    f"nvidia.com/gpu.{name}" for name in ("sharing-strategy", "replicas", "product")
)


@pytest.mark.parametrize(
    ("method", "renamed", "resource", "labels"),
    [
        (
            "timeSlicing", False, GPU,
            {STRATEGY: "time-slicing", REPLICAS: "10", PRODUCT: "...-SHARED"},
        ),
        ("timeSlicing", True, f"{GPU}.shared", {STRATEGY: "time-slicing", REPLICAS: "10"}),
        ("mps", False, GPU, {STRATEGY: "mps", REPLICAS: "10", PRODUCT: "...-SHARED"}),
        ("mps", True, f"{GPU}.shared", {STRATEGY: "mps", REPLICAS: "10"}),
    ],
)  # fmt: skip
def test_method_and_rename_decide_what_a_node_offers_and_its_labels(
    method: str, renamed: bool, resource: str, labels: dict[str, str]
) -> None:
    sharing = parsed(written(method, renameByDefault=renamed))

    assert (sharing.resource, sharing.labels, sharing.warnings) == (resource, labels, ())


@pytest.mark.parametrize(
    ("method", "fields", "fails"),
    [
        ("timeSlicing", {}, False),
        ("timeSlicing", {"failRequestsGreaterThanOne": True}, True),
        ("mps", {}, True),
        ("mps", {"failRequestsGreaterThanOne": False}, False),
    ],
)
def test_requests_above_one_fail_by_default_with_mps_only(
    method: str, fields: dict[str, bool], fails: bool
) -> None:
    assert parsed(written(method, **fields)).fails_above_one == fails


def test_a_file_without_sharing_stands_for_whole_gpus() -> None:
    for document in (
        {"version": "v1"},
        {"version": "v1", "flags": {"migStrategy": "mixed"}},
        {"version": "v1", "sharing": {}},
    ):
        sharing = parsed(document)

        assert (sharing.strategy, sharing.part) == ("none", {GPU: 1})
        assert sharing.labels == {STRATEGY: "none"}


def test_mps_wins_where_both_methods_are_written() -> None:
    both = written("mps", replicas=4)
    both["sharing"] |= written(replicas=2)["sharing"]

    sharing = parsed(both)

    assert (sharing.strategy, sharing.replicas) == ("mps", {GPU: 4})
    assert sharing.warnings == ("sharing.timeSlicing has no effect beside sharing.mps",)


@pytest.mark.parametrize(
    ("document", "warning"),
    [
        (written(rename="nvidia.com/gpu.mine"), "resources[0].rename has no effect"),
        (written(devices=[0, "GPU-1234", "1:0", "MIG-GPU-12/3/0"]), "resources[0].devices has no"),
        (written(devices=2), "sharing.timeSlicing.resources[0].devices has no effect"),
        (written(replica=3), "sharing.timeSlicing has a key 'replica' that nothing reads"),
        (written() | {"resources": {"gpus": []}, "x": 1}, "has a key 'x' that nothing reads"),
        (written() | {"resources": {"gpus": [1]}}, "resources has no effect, as in NVIDIA's"),
    ],
)
def test_what_the_plugin_ignores_is_warned_of(document: object, warning: str) -> None:
    sharing = parsed(document)

    assert sharing.replicas == {GPU: 10}
    assert any(warning in text for text in sharing.warnings), sharing.warnings


def test_instances_are_shared_by_time_slicing() -> None:
    sharing = parsed(written(name=MIG, replicas=2) | {"flags": {"migStrategy": "mixed"}})

    assert sharing.replicas == {MIG: 2}
    assert (sharing.resource, sharing.labels) == (GPU, {STRATEGY: "none"})


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        ([], "the configuration must be a mapping, got"),
        ({"sharing": {}}, "version must be v1, got None"),
        ({"version": "v2"}, "version must be v1, got 'v2'"),
        ({"version": "v1", "sharing": [1]}, "sharing must be a mapping"),
        (
            {"version": "v1", "sharing": {"mps": {}}},
            "sharing.mps.resources must list resources with name and replicas",
        ),
        (
            {"version": "v1", "sharing": {"timeSlicing": {"resources": []}}},
            "sharing.timeSlicing.resources must list",
        ),
        (written(name=None), "resources[0].name must be nvidia.com/gpu or nvidia.com/mig-..."),
        (written(name="amd.com/gpu"), "got 'amd.com/gpu'"),
        (written(replicas=None), "replicas must be a whole number from 2 to 4096, got None"),
        (written(replicas=1), "replicas must be a whole number from 2 to 4096, got 1"),
        (written(replicas=0), "got 0"),
        (written(replicas=-2), "got -2"),
        (written(replicas="4"), "got '4'"),
        (written(replicas=True), "got True"),
        (written("mps", replicas=101), "must be at most 100, got 101: a client would get 0 %"),
        (written(devices="some"), "devices must be all, a number above 0, or a list"),
        (written(devices=0), "devices must be all"),
        (written(devices=["card0"]), "devices must be all"),
        (written(renameByDefault="yes please"), "renameByDefault must be true or false, got 'yes"),
        (written("mps", name=MIG, replicas=2), f"sharing.mps names {MIG}: MPS and MIG exclude"),
        (
            written("mps") | {"flags": {"migStrategy": "mixed"}},
            "flags.migStrategy is mixed: MPS and MIG exclude each other",
        ),
        (written() | {"flags": {"migStrategy": "all"}}, "flags.migStrategy must be one of none"),
    ],
)
def test_what_the_plugin_refuses_is_refused_with_field_value_and_rule(
    document: object, fault: str
) -> None:
    with pytest.raises(RequestError) as refused:
        parsed(document)

    assert fault in str(refused.value)


def test_a_resource_is_named_once() -> None:
    document = written()
    document["sharing"]["timeSlicing"]["resources"] *= 2

    with pytest.raises(RequestError, match=r"resources names nvidia\.com/gpu twice"):
        parsed(document)


def test_a_config_map_has_a_configuration_for_each_key() -> None:
    config_map = {"kind": "ConfigMap", "data": {"a": "version: v1", "b": ""}}

    assert dict(named_configs(config_map)) == {"a": "version: v1", "b": ""}
    assert [name for name, _ in named_configs({"version": "v1"})] == [""]
    with pytest.raises(RequestError, match="the ConfigMap has no data"):
        list(named_configs({"kind": "ConfigMap"}))


@pytest.mark.parametrize("method", ["timeSlicing", "mps"])
def test_the_part_to_write_is_no_more_than_a_replica_has_and_all_replicas_fit(method: str) -> None:
    for replicas in range(2, 101):
        limits = parsed(written(method, replicas=replicas)).part
        container = ContainerManifest(name="main", limits=limits)
        pod = PodManifest(namespace=Namespace("ns"), containers=(container,))

        [request] = parse_pod_request(pod, Rules()).containers
        memory_mib = required_memory_mib(request, device(memory_mib=143_771))

        assert not request.whole
        assert 0 < memory_mib * replicas <= 143_771
        assert request.cores_percent == (100 // replicas if method == "mps" else 0)


@pytest.mark.parametrize(
    "selector",
    [
        {STRATEGY: "mps"},
        {PRODUCT: "Tesla-T4-SHARED"},
        {REPLICAS: "4"},
        {"cloud.google.com/gke-gpu-sharing-strategy": "time-sharing"},
        {"cloud.google.com/gke-max-shared-clients-per-gpu": "3"},
    ],
)
def test_a_selector_of_replicas_is_named_for_a_pod_with_amounts_only(
    selector: dict[str, str],
) -> None:
    [text] = find_sharing_selectors(selector | {"zone": "a"}, requested({GPU: 1, MEMORY: 1000}))

    assert text.startswith(f"nodeSelector {next(iter(selector))}: ")
    assert text.endswith("or request nvidia.com/gpu alone")
    assert list(find_sharing_selectors(selector, requested({GPU: 1}))) == []


def test_a_selector_of_partitions_is_named_with_what_to_request() -> None:
    selector = {"cloud.google.com/gke-gpu-partition-size": "1g.5gb"}

    [text] = find_sharing_selectors(selector, requested({GPU: 1}))

    assert text.endswith("nvidia.com/vgpu-mode: mig")


def test_selectors_of_whole_gpus_are_left_alone() -> None:
    selector = {STRATEGY: "none", REPLICAS: "1", PRODUCT: "Tesla-T4"}

    assert list(find_sharing_selectors(selector, requested({GPU: 1, MEMORY: 1000}))) == []


def test_the_nodes_label_chooses_its_configuration() -> None:
    configs = {"slices": "a", "servers": "b", "default": "c"}

    assert config_for(configs, "servers") == "b"
    assert config_for(configs, None) == "c"
    assert config_for({"slices": "a"}, None) == "a", "the only one"
    assert config_for({"slices": "a", "servers": "b"}, None) is None
    assert config_for({}, None) is None
    with pytest.raises(RequestError, match=r"device-plugin\.config of the node is 'none'.*slices"):
        config_for({"slices": "a"}, "none")


def test_a_configuration_becomes_the_replicas_of_a_node() -> None:
    assert replicas_of(parsed(written("mps", renameByDefault=True))) == Replicas(
        number=10, strategy="mps", resource=f"{GPU}.shared", one_per_container=True
    )
    assert replicas_of(parsed(written(replicas=4))) == Replicas(
        number=4, strategy="time-slicing", resource=GPU
    )
    assert replicas_of(parsed({"version": "v1"})) is None
    with pytest.raises(RequestError, match="instances of MIG"):
        replicas_of(parsed(written(name=MIG, replicas=2)))


@pytest.mark.parametrize("strategy", ["time-slicing", "mps"])
@pytest.mark.parametrize("renamed", [False, True])
def test_words_26_the_labels_of_a_node_are_those_of_its_replicas(
    strategy: Any, renamed: bool
) -> None:
    resource = f"{GPU}.shared" if renamed else GPU
    replicas = Replicas(number=4, strategy=strategy, resource=resource)
    card = device(
        model="NVIDIA A100-SXM4-40GB", mode=DeviceMode.REPLICAS, replicas=replicas, slots=4
    )
    shown = advertisement_of(
        DIALECTS.values(), [card, replace(card, uuid=DeviceUuid("GPU-b"), index=1)], "auto"
    )

    assert shown.own_labels == {
        STRATEGY: strategy,
        REPLICAS: "4",
        "cloud.google.com/gke-gpu-sharing-strategy": (
            "time-sharing" if strategy == "time-slicing" else "mps"
        ),
        "cloud.google.com/gke-max-shared-clients-per-gpu": "4",
        **({} if renamed else {PRODUCT: "NVIDIA-A100-SXM4-40GB-SHARED"}),
    }
    assert {name: len(ids) for name, ids in shown.served.items() if ids} == {resource: 8}
    assert not any(shown.node_status.values()), "no amounts"


def test_a_node_without_replicas_has_no_such_label() -> None:
    shown = advertisement_of(DIALECTS.values(), [device()], "auto")

    assert shown.own_labels == {}
    assert f"{GPU}.shared" not in shown.served
