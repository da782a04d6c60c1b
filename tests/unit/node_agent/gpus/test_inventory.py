"""The devices that are offered of the GPUs of a node."""

from dataclasses import replace

from services.node_agent.gpus.inventory import Gpu, SharingConfig, devices_of
from services.node_agent.views.advertisement import advertisement_of
from shared.dialects import DIALECTS
from shared.dialects.advertised import Strategy
from shared.model.names import DeviceUuid

MEMORY = "volcano.sh/gpu-memory"
GPUS = tuple(
    Gpu(uuid=DeviceUuid(f"GPU-{n}"), index=n, model="NVIDIA GeForce GTX 1080 Ti", memory_mib=11178)
    for n in range(8)
)


def test_12_devices_are_ordered_by_minor_number() -> None:
    devices = devices_of(reversed(GPUS), SharingConfig())

    shown = advertisement_of(DIALECTS.values(), devices, Strategy.AUTO)

    assert [device.index for device in devices] == list(range(8))
    register = shown.annotations["volcano.sh/node-vgpu-register"] or ""
    assert register.startswith("GPU-0,10,11178,NVIDIA GeForce GTX 1080 Ti,true,hami-core:")


def test_a_lost_gpu_stays_unhealthy_and_its_ids_are_not_reused() -> None:
    before = devices_of(GPUS[:2], SharingConfig())

    after = devices_of(GPUS[1:2], SharingConfig(), before)

    assert [(device.uuid, device.healthy) for device in after] == [
        ("GPU-0", False),
        ("GPU-1", True),
    ]


def test_a_gpu_with_the_index_of_a_lost_one_gets_new_ids() -> None:
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
