"""The devices that are offered of the GPUs of a node."""

from dataclasses import replace

from services.node_agent.gpus.inventory import Gpu, devices_of
from services.node_agent.gpus.sharing_config import SharingConfig
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
    assert register.startswith("GPU-0,10,11178,NVIDIA-NVIDIA GeForce GTX 1080 Ti,true,hami-core:")


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
