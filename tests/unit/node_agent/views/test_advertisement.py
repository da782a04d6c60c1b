"""The devices that are offered of a node's GPUs, and how it advertises them."""

from dataclasses import replace

import pytest

from services.node_agent.gpus.inventory import Gpu, SharingConfig, devices_of
from services.node_agent.kubelet.device_plugin import encode_list
from services.node_agent.views.advertisement import (
    MAX_LIST_BYTES,
    advertisement_of,
    check_list,
    list_size_bytes,
)
from services.node_agent.views.node_patches import (
    merge_own_entries,
    merge_own_labels,
    sharing_condition,
)
from shared.dialects import DIALECTS
from shared.dialects.advertised import PluginDeviceId, Strategy
from shared.kubelet_api.deviceplugin import api_pb2
from shared.kubernetes.types import Condition
from shared.model.bounds import HIGHEST_INDEX
from shared.model.errors import RequestError
from shared.model.names import DeviceUuid

MEMORY = "volcano.sh/gpu-memory"
GPUS = tuple(
    Gpu(uuid=DeviceUuid(f"GPU-{n}"), index=n, model="NVIDIA GeForce GTX 1080 Ti", memory_mib=11178)
    for n in range(8)
)


def test_the_node_is_annotated_and_a_resource_has_the_amounts_that_pods_request_beside_it() -> None:
    shown = advertisement_of(DIALECTS.values(), devices_of(GPUS, SharingConfig()), Strategy.AUTO)

    assert shown.annotations["leasehold.dev/agent"] == "true"
    assert shown.amounts["leasehold.dev/share"] == {MEMORY, "volcano.sh/gpu-number"}


def test_the_size_of_a_list_is_computed_exactly() -> None:
    ids = [PluginDeviceId(id=f"GPU-{n}-{n}", healthy=n % 2 == 0) for n in range(50)]

    encoded = encode_list({entry.id: entry for entry in ids})
    read = api_pb2.ListAndWatchResponse.FromString(encoded)

    assert list_size_bytes(ids) == len(encoded)
    assert [(device.ID, device.health == "Healthy") for device in read.devices] == [
        (entry.id, entry.healthy) for entry in ids
    ]


def test_ids_show_the_numa_nodes_of_their_device() -> None:
    gpus = ("GPU-0", "GPU-1", "GPU-2")
    ids = [PluginDeviceId(id=f"{gpu}::0", healthy=True, device=DeviceUuid(gpu)) for gpu in gpus]
    ids.append(PluginDeviceId(id="any", healthy=True))
    numa = {DeviceUuid("GPU-0"): (0,), DeviceUuid("GPU-1"): (1, HIGHEST_INDEX)}

    encoded = encode_list({entry.id: entry for entry in ids}, numa)
    read = api_pb2.ListAndWatchResponse.FromString(encoded)

    assert [tuple(node.ID for node in each.topology.nodes) for each in read.devices] == [
        (0,), (1, HIGHEST_INDEX), (), (),
    ]  # fmt: skip


def test_no_list_and_no_id_is_longer_than_the_kubelet_accepts() -> None:
    ids = tuple(PluginDeviceId(id=f"{n:060d}", healthy=True) for n in range(MAX_LIST_BYTES // 60))

    with pytest.raises(RequestError, match="4000000"):
        check_list(MEMORY, ids)
    with pytest.raises(RequestError, match="64 characters"):
        check_list(MEMORY, [PluginDeviceId(id="x" * 64, healthy=True)])


# Devices of GPUs that are lost, replaced, or change their index


def test_12_devices_are_ordered_by_minor_number() -> None:
    devices = devices_of(reversed(GPUS), SharingConfig())

    shown = advertisement_of(DIALECTS.values(), devices, Strategy.AUTO)

    assert [device.index for device in devices] == list(range(8))
    register = shown.annotations["volcano.sh/node-vgpu-register"] or ""
    assert register.startswith("GPU-0,10,11178,NVIDIA GeForce GTX 1080 Ti,true,hami-core:")


def test_a_gpu_with_the_index_of_a_lost_one_gets_new_ids() -> None:
    lost = GPUS[0]
    put_in = replace(GPUS[0], uuid=DeviceUuid("GPU-00"))
    before = devices_of([lost], SharingConfig())
    both = devices_of([put_in], SharingConfig(), before)

    for strategy in (Strategy.AUTO, Strategy.NUMBER):
        old = advertisement_of(DIALECTS.values(), before, strategy)
        new = advertisement_of(DIALECTS.values(), both, strategy)
        for resource, ids in new.served.items():
            known = old.served[resource]
            assert all(known[text].device == ids[text].device for text in ids if text in known)
            assert sum(entry.healthy for entry in ids.values()) == len(known), resource
        assert new.annotation_entries["volcano.sh/gpu-unhealthy-ids"] == ()


def placed(gpu: Gpu, index: int) -> Gpu:
    return replace(gpu, bus=f"0000:0{gpu.index}:00.0", index=index)


def test_devices_keep_their_uuids_when_their_indices_change() -> None:
    before = devices_of([placed(gpu, n) for n, gpu in enumerate(GPUS[:3])], SharingConfig())
    swapped = [placed(gpu, 2 - n) for n, gpu in enumerate(GPUS[:3])]

    after = devices_of(swapped, SharingConfig(), before, held={})

    assert [(device.uuid, device.index) for device in after] == [
        ("GPU-2", 0), ("GPU-1", 1), ("GPU-0", 2),
    ]  # fmt: skip
    assert all(device.healthy for device in after)


def test_a_missing_gpu_is_not_replaced_by_one_that_took_its_index() -> None:
    before = devices_of([placed(gpu, n) for n, gpu in enumerate(GPUS[:2])], SharingConfig())

    after = devices_of([placed(GPUS[1], 0)], SharingConfig(), before, held={})

    assert [(device.uuid, device.healthy) for device in after] == [
        ("GPU-0", False),
        ("GPU-1", True),
    ]


def test_a_replaced_gpu_stays_while_it_is_held() -> None:
    old, new = placed(GPUS[0], 0), replace(placed(GPUS[0], 0), uuid=DeviceUuid("GPU-new"))
    before = devices_of([old], SharingConfig())

    held = devices_of([new], SharingConfig(), before, held={old.uuid: 1})
    unheld = devices_of([new], SharingConfig(), before, held={})

    assert [device.uuid for device in unheld] == ["GPU-new"]
    assert [device.fault.partition(":")[0] for device in held if not device.healthy] == ["Replaced"]


# Annotations that an operator and the agent both write


KEY = "volcano.sh/gpu-unhealthy-ids"
OWN = "leasehold.dev/own-gpu-unhealthy-ids"


@pytest.mark.parametrize(
    ("present", "ours", "changes"),
    [
        pytest.param({}, (), {}, id="no entries"),
        pytest.param({}, ("3",), {KEY: "3", OWN: "3"}, id="the first of ours"),
        pytest.param({KEY: "0, 1"}, (), {}, id="an operator's stay as written"),
        pytest.param({KEY: "0"}, ("3",), {KEY: "0,3", OWN: "3"}, id="ours beside others'"),
        pytest.param({KEY: "0,3", OWN: "3"}, ("3",), {}, id="no change, no write"),
        pytest.param({KEY: "0,3", OWN: "3"}, (), {KEY: "0", OWN: None}, id="ours recovers"),
        pytest.param({KEY: "3", OWN: "3"}, (), {KEY: None, OWN: None}, id="the last one goes"),
        pytest.param({KEY: "3"}, ("3",), {}, id="an operator named it before: it is theirs"),
        pytest.param({KEY: "0", OWN: "3"}, ("3",), {KEY: "0,3"}, id="removed, and still unhealthy"),
    ],
)
def test_item_6_only_the_agents_own_entries_change(
    present: dict[str, str], ours: tuple[str, ...], changes: dict[str, str | None]
) -> None:
    assert merge_own_entries(present, {KEY: ours}) == changes


RECORD = "leasehold.dev/own-labels"


@pytest.mark.parametrize(
    ("labels", "recorded", "ours", "changed", "record"),
    [
        ({}, None, {"a": "1"}, {"a": "1"}, {RECORD: "a"}),
        ({"a": "1"}, "a", {"a": "1"}, {}, {}),
        ({"a": "2"}, "a", {"a": "1"}, {"a": "1"}, {}),
        ({"a": "1", "b": "2"}, "a,b", {"b": "2"}, {"a": None}, {RECORD: "b"}),
        ({"a": "1"}, "a", {}, {"a": None}, {RECORD: None}),
        ({"a": "1"}, None, {}, {}, {}),
    ],
)
def test_labels_that_others_may_write_are_removed_only_if_they_are_ours(
    labels: dict[str, str],
    recorded: str | None,
    ours: dict[str, str],
    changed: dict[str, str | None],
    record: dict[str, str | None],
) -> None:
    annotations = {} if recorded is None else {RECORD: recorded}

    assert merge_own_labels(labels, annotations, ours) == (changed, record)


def test_the_condition_is_written_when_it_changes_and_not_on_a_node_without_problems() -> None:
    ready = Condition(type="Ready", status="True")
    [waiting] = sharing_condition([ready], "ml/a holds one", now_s=0)
    stored = Condition(type=waiting["type"], status="False", message="ml/a holds one")
    [other] = sharing_condition([stored], "ml/b holds one", now_s=60)
    [solved] = sharing_condition([ready, stored], "", now_s=60)

    assert sharing_condition([ready], "", now_s=0) == []
    assert waiting == {
        "type": "leasehold.dev/GpuSharing",
        "status": "False",
        "reason": "Waiting",
        "message": "ml/a holds one",
        "lastTransitionTime": "1970-01-01T00:00:00Z",
    }
    assert sharing_condition([stored], "ml/a holds one", now_s=60) == []
    assert "lastTransitionTime" not in other, "it has that status since before"
    assert (solved["status"], solved["message"]) == ("True", "")
