"""What a node advertises for its devices."""

from dataclasses import replace

import pytest

from proto.deviceplugin import api_pb2
from services.node_agent.gpus.inventory import Gpu, devices_of
from services.node_agent.gpus.sharing_config import SharingConfig
from services.node_agent.kubelet.device_plugin import encode_list
from services.node_agent.views.advertisement import (
    MAX_LIST_BYTES,
    advertisement_of,
    check_list,
    list_size_bytes,
)
from shared.dialects import DIALECTS
from shared.dialects.advertised import (
    PluginDeviceId,
    Strategy,
)
from shared.model.errors import RequestError
from shared.model.names import DeviceUuid
from tests.support.node_agent.advertisements import healthy_counts

MEMORY = "volcano.sh/gpu-memory"
GPUS = tuple(
    Gpu(uuid=DeviceUuid(f"GPU-{n}"), index=n, model="NVIDIA GeForce GTX 1080 Ti", memory_mib=11178)
    for n in range(8)
)


def test_01_eight_cards_of_11178_mib_show_89424_units_and_eight_cards() -> None:
    shown = advertisement_of(DIALECTS.values(), devices_of(GPUS, SharingConfig()), Strategy.SHARE)

    assert healthy_counts(shown)[MEMORY] == 89424
    assert shown.node_status["volcano.sh/gpu-number"] == 8


def test_02_in_number_mode_memory_is_shown_as_nothing() -> None:
    shown = advertisement_of(DIALECTS.values(), devices_of(GPUS, SharingConfig()), Strategy.NUMBER)

    assert shown.node_status[MEMORY] == 0
    assert healthy_counts(shown)["volcano.sh/gpu-number"] == 8


def test_13_slots_cores_and_memory_add_up_over_the_cards() -> None:
    devices = devices_of(GPUS, SharingConfig(split_count=4, unit_mib=100))

    shown = advertisement_of(DIALECTS.values(), devices, Strategy.AUTO)

    assert healthy_counts(shown)["volcano.sh/vgpu-number"] == 32
    assert shown.node_status["volcano.sh/vgpu-cores"] == 800
    assert shown.node_status["volcano.sh/vgpu-memory"] == 8 * 111
    assert {device.memory_mib for device in devices} == {11178}, "as NVML says, whatever the unit"


def test_the_node_shows_that_our_agent_reports_its_devices() -> None:
    shown = advertisement_of(DIALECTS.values(), devices_of(GPUS, SharingConfig()), Strategy.AUTO)

    assert shown.annotations["leasehold.dev/agent"] == "true"


def test_17_a_list_too_long_names_the_factor_needed() -> None:
    many = [replace(gpu, memory_mib=81920) for gpu in GPUS]

    with pytest.raises(RequestError, match=r"factor of \d+ or more"):
        advertisement_of(DIALECTS.values(), devices_of(many, SharingConfig()), Strategy.SHARE)


def test_memory_too_long_for_a_list_is_written_into_the_status_and_shares_are_served() -> None:
    many = [replace(gpu, memory_mib=81920) for gpu in GPUS]

    shown = advertisement_of(DIALECTS.values(), devices_of(many, SharingConfig()), Strategy.AUTO)

    assert shown.node_status[MEMORY] == 8 * 81920
    assert healthy_counts(shown)["leasehold.dev/share"] == 800


def test_the_size_of_a_list_is_computed_exactly() -> None:
    ids = [PluginDeviceId(id=f"GPU-{n}-{n}", healthy=n % 2 == 0) for n in range(50)]

    encoded = encode_list({entry.id: entry for entry in ids})
    read = api_pb2.ListAndWatchResponse.FromString(encoded)

    assert list_size_bytes(ids) == len(encoded)
    assert [(device.ID, device.health == "Healthy") for device in read.devices] == [
        (entry.id, entry.healthy) for entry in ids
    ]


def test_no_list_and_no_id_is_longer_than_the_kubelet_takes() -> None:
    ids = tuple(PluginDeviceId(id=f"{n:060d}", healthy=True) for n in range(MAX_LIST_BYTES // 60))

    with pytest.raises(RequestError, match="4000000"):
        check_list(MEMORY, ids)
    with pytest.raises(RequestError, match="64 characters"):
        check_list(MEMORY, [PluginDeviceId(id="x" * 64, healthy=True)])
