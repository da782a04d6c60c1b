"""What a node has and shows."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from proto.deviceplugin import api_pb2
from services.node_agent.gpus.inventory import Gpu, devices_of
from services.node_agent.gpus.sharing_config import SharingConfig, check_sharing_config
from services.node_agent.gpus.simulated.gpus import SimulatedGpus, parse_layout, uuid_of
from services.node_agent.gpus.simulated.models import GPU_MODELS
from services.node_agent.kubelet.device_ids import compact
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
from shared.model.names import DeviceUuid, NodeName

MEMORY = "volcano.sh/gpu-memory"
GPUS = tuple(
    Gpu(uuid=DeviceUuid(f"GPU-{n}"), index=n, model="NVIDIA GeForce GTX 1080 Ti", memory_mib=11178)
    for n in range(8)
)


def test_01_eight_cards_of_11178_mib_show_89424_units_and_eight_cards() -> None:
    shown = advertisement_of(DIALECTS.values(), devices_of(GPUS, SharingConfig()), Strategy.SHARE)

    assert shown.healthy_counts[MEMORY] == 89424
    assert shown.patched["volcano.sh/gpu-number"] == 8


def test_02_in_number_mode_memory_is_shown_as_nothing() -> None:
    shown = advertisement_of(DIALECTS.values(), devices_of(GPUS, SharingConfig()), Strategy.NUMBER)

    assert shown.patched[MEMORY] == 0
    assert shown.healthy_counts["volcano.sh/gpu-number"] == 8


def test_13_slots_cores_and_memory_add_up_over_the_cards() -> None:
    devices = devices_of(GPUS, SharingConfig(split_count=4, unit_mib=100))

    shown = advertisement_of(DIALECTS.values(), devices, Strategy.AUTO)

    assert shown.healthy_counts["volcano.sh/vgpu-number"] == 32
    assert shown.patched["volcano.sh/vgpu-cores"] == 800
    assert shown.patched["volcano.sh/vgpu-memory"] == 8 * 111
    assert {device.memory_mib for device in devices} == {11178}, "as NVML says, whatever the unit"


def test_12_devices_come_in_order_of_their_minor_number() -> None:
    devices = devices_of(reversed(GPUS), SharingConfig())

    shown = advertisement_of(DIALECTS.values(), devices, Strategy.AUTO)

    assert [device.index for device in devices] == list(range(8))
    register = shown.annotations["volcano.sh/node-vgpu-register"] or ""
    assert register.startswith("GPU-0,10,11178,NVIDIA-NVIDIA GeForce GTX 1080 Ti,true,hami-core:")


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

    assert shown.patched[MEMORY] == 8 * 81920
    assert shown.healthy_counts["leasehold.dev/share"] == 800


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


def test_a_lost_card_stays_unhealthy_and_its_ids_are_never_anothers() -> None:
    before = devices_of(GPUS[:2], SharingConfig())

    after = devices_of(GPUS[1:2], SharingConfig(), before)

    assert [(device.uuid, device.healthy) for device in after] == [
        ("GPU-0", False),
        ("GPU-1", True),
    ]


def test_a_card_in_the_place_of_a_lost_one_has_ids_of_its_own() -> None:
    lost, put_in = GPUS[0], replace(GPUS[0], uuid=DeviceUuid("GPU-00"))
    before = devices_of([lost], SharingConfig())
    both = devices_of([put_in], SharingConfig(), before)

    for strategy in (Strategy.AUTO, Strategy.NUMBER):
        old = advertisement_of(DIALECTS.values(), before, strategy)
        new = advertisement_of(DIALECTS.values(), both, strategy)
        for resource, ids in new.served.items():
            known = old.served[resource]
            assert all(known[text].device == ids[text].device for text in ids if text in known)
            assert sum(entry.healthy for entry in ids.values()) == len(known), resource
        assert new.lists["volcano.sh/gpu-unhealthy-ids"] == ()


def test_a_division_that_cannot_be_is_refused_by_its_flag() -> None:
    for division, flag in (
        (SharingConfig(split_count=0), "--device-split-count"),
        (SharingConfig(unit_mib=0), "--memory-factor"),
        (SharingConfig(strategy="guess"), "--gpu-strategy"),
    ):
        with pytest.raises(RequestError, match=flag):
            check_sharing_config(division, Strategy.ALL)


def test_layouts_mix_models() -> None:
    layout = parse_layout("4xT4+2xA10")

    assert [gpu.model.product for gpu in layout] == ["Tesla T4"] * 4 + ["NVIDIA A10"] * 2
    for text in ("", "8xB1", "xT4", "0xT4", "8 T4"):
        with pytest.raises(RequestError, match="is not a GPU layout"):
            parse_layout(text)


def test_profiles_are_the_published_ones() -> None:
    assert GPU_MODELS["T4"].memory_mib == 15360
    assert GPU_MODELS["GTX1080Ti"].memory_mib == 11178
    assert set(GPU_MODELS) >= {"T4", "A10", "L4", "A100-40GB", "A100-80GB", "H100-80GB", "H200"}


async def test_simulated_gpus_keep_their_names_and_read_their_faults(tmp_path: Path) -> None:
    node, faults = NodeName("node-0"), tmp_path / "faults.json"
    gpus = SimulatedGpus(node, "2xT4", faults)

    before = await gpus.discover()
    faults.write_text('{"1": "unhealthy"}')
    after = await gpus.discover()

    assert [gpu.uuid for gpu in before] == [uuid_of(node, 0), uuid_of(node, 1)]
    assert before == await SimulatedGpus(node, "2xT4").discover()
    assert [gpu.fault is None for gpu in after] == [True, False]
    assert uuid_of(NodeName("node-1"), 0) != uuid_of(node, 0)


class OnASlowMachine(SimulatedGpus):
    """Simulated GPUs whose threads get the processor late."""

    def _look(self, index: int) -> Gpu | None:
        time.sleep(0.2)
        return super()._read_gpu(index)


async def test_simulated_gpus_are_not_taken_for_silent_because_the_machine_is_slow(
    tmp_path: Path,
) -> None:
    node, faults = NodeName("node-0"), tmp_path / "faults.json"
    gpus = OnASlowMachine(node, "2xT4", faults, hang_limit_s=0.05)

    slow = await gpus.discover()
    faults.write_text('{"1": "hang"}')
    hanging = await gpus.discover()
    faults.write_text("{}")

    assert [gpu.fault for gpu in slow] == [None, None]
    assert hanging[1].fault is not None
    assert hanging[1].fault.code == "NoResponse"


def test_many_ids_are_kept_as_runs_and_compare_equal_in_any_order() -> None:
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    ids = [f"0-{digits[n // 36]}{digits[n % 36]}" for n in range(36, 200)]

    assert compact(ids) == ("0-10..0-5j",)
    assert compact(reversed(ids)) == compact(ids)
    assert compact([*ids[:50], *ids[60:]]) == (f"0-10..{ids[49]}", f"{ids[60]}..0-5j")
    assert compact(["b", "a"]) == ("a", "b")
