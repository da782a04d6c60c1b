"""HAMi's annotations, byte by byte."""

import json

import pytest
from msgspec import structs

from shared.dialects import DIALECTS
from shared.dialects.advertised import Strategy
from shared.dialects.nvidia.annotations import cordoned_devices, encode_devices
from shared.model.device import DeviceMode
from shared.model.lease import Lease, MigPlacement
from shared.model.lease_copy import dump_lease, load_lease
from shared.model.names import DeviceUuid
from tests.support.dialects.builders import container_with, device, leased, pod

HAMI = DIALECTS["nvidia"]
LIMITS = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 4096, "nvidia.com/gpucores": 30}
REGISTER, CORDON = "hami.io/node-nvidia-register", "hami.io/device-cordon"


def dossier() -> Lease:
    """The published example: an init container without a GPU, a container with two."""
    two = container_with("main", limits={**LIMITS, "nvidia.com/gpu": 2})
    held = leased(pod(container_with("init", init=True), two), (0, 1))
    names = {"GPU-0": "GPU-aaaa", "GPU-1": "GPU-bbbb"}
    shares = (structs.replace(s, device=DeviceUuid(names[s.device])) for s in held.shares)
    return structs.replace(held, shares=tuple(shares))


def test_hami_the_published_list_is_written_with_its_empty_elements() -> None:
    assert encode_devices(dossier()) == ";GPU-aaaa,NVIDIA,4096,30:GPU-bbbb,NVIDIA,4096,30:;"


def test_hami_the_list_is_kept_in_the_lease_copy() -> None:
    held = dossier()
    back = load_lease(dump_lease(held), namespace=held.namespace, name=held.name)

    assert encode_devices(back) == encode_devices(held)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("a", "GPU-0,NVIDIA,4096,30:;"),
        ("a-", "GPU-0,NVIDIA,4096,30:;;"),
        ("-a", ";GPU-0,NVIDIA,4096,30:;"),
        ("ab", "GPU-0,NVIDIA,4096,30:;GPU-1,NVIDIA,4096,30:;"),
        ("-a-b-", ";GPU-0,NVIDIA,4096,30:;;GPU-1,NVIDIA,4096,30:;;"),
    ],
)
def test_hami_every_container_has_an_element(names: str, text: str) -> None:
    containers = [
        container_with(f"plain{n}") if name == "-" else container_with(name, limits=LIMITS)
        for n, name in enumerate(names)
    ]
    places = [(index,) for index in range(len(names.replace("-", "")))]

    assert encode_devices(leased(pod(*containers), *places)) == text


def test_hami_an_assignment_has_all_its_keys_in_seconds() -> None:
    notes = HAMI.binding_annotations(leased(pod(container_with(limits=LIMITS)), (0,)), 1787000000.9)

    assert notes == {
        "hami.io/vgpu-node": "gpu-a",
        "hami.io/vgpu-time": "1787000000",
        "hami.io/vgpu-devices-to-allocate": "GPU-0,NVIDIA,4096,30:;",
        "hami.io/vgpu-devices-allocated": "GPU-0,NVIDIA,4096,30:;",
        "hami.io/bind-time": "1787000000",
        "hami.io/bind-phase": "allocating",
    }


def test_hami_elements_are_emptied_one_by_one_and_the_last_ends_the_phase() -> None:
    held = leased(
        pod(container_with("a", limits=LIMITS), container_with("b", limits=LIMITS)), (0,), (1,)
    )

    assert HAMI.allocated_annotations(held, frozenset("a")) == {
        "hami.io/vgpu-devices-to-allocate": ";GPU-1,NVIDIA,4096,30:;"
    }
    assert HAMI.allocated_annotations(held, frozenset("ab")) == {
        "hami.io/vgpu-devices-to-allocate": ";;",
        "hami.io/bind-phase": "success",
    }
    assert HAMI.failed_annotations(held) == {"hami.io/bind-phase": "failed"}


def test_hami_a_mig_instance_is_named_after_its_place() -> None:
    held = leased(pod(container_with(limits=LIMITS)), (0,))
    place = MigPlacement(layout="group1", position=2, profile="1g.10gb")
    held = structs.replace(held, shares=(structs.replace(held.shares[0], mig=place),))

    assert encode_devices(held) == "GPU-0[group1-2],NVIDIA,4096,30:;"


def test_hami_the_register_has_a_record_per_device_without_what_is_zero() -> None:
    cards = [
        device(0, 15360),
        device(1, 81920, model="A100", numa=1, mode=DeviceMode.MIG, healthy=False, unit_mib=10),
    ]
    notes = HAMI.advertise(cards, Strategy.AUTO).annotations

    assert json.loads(notes[REGISTER] or "") == [
        {
            "id": "GPU-0",
            "count": 10,
            "devmem": 15360,
            "devcore": 100,
            "type": "NVIDIA-Tesla T4",
            "mode": "hami-core",
            "health": True,
        },
        {
            "id": "GPU-1",
            "index": 1,
            "count": 10,
            "devmem": 81920,
            "devcore": 100,
            "type": "NVIDIA-A100",
            "numa": 1,
            "mode": "mig",
        },
    ]
    assert notes["hami.io/node-nvidia-score"] is None


def test_hami_link_scores_are_advertised_where_they_are_known() -> None:
    one, other = DeviceUuid("GPU-0"), DeviceUuid("GPU-1")
    cards = [device(0, links={other: 160}), device(1, links={one: 160})]
    notes = HAMI.advertise(cards, Strategy.AUTO).annotations

    assert json.loads(notes["hami.io/node-nvidia-score"] or "") == [
        {"uuid": "GPU-0", "score": {"GPU-1": 160}},
        {"uuid": "GPU-1", "score": {"GPU-0": 160}},
    ]


def test_hami_a_register_of_sixteen_devices_is_far_below_what_annotations_may_hold() -> None:
    cards = [
        device(n, 196608, links={DeviceUuid(f"GPU-{m}" + 36 * "0"): 1860 for m in range(16)})
        for n in range(16)
    ]

    written = HAMI.advertise(cards, Strategy.AUTO).annotations.values()

    assert sum(len(text or "") for text in written) < 32 * 1024


def test_hami_cordoned_devices_are_found_by_uuid() -> None:
    register = HAMI.advertise([device(n) for n in range(4)], Strategy.AUTO).annotations[REGISTER]
    notes = {REGISTER: register or "", CORDON: " GPU-3 ,GPU-0,GPU-9,"}

    assert cordoned_devices(notes) == (0, 3)
    assert cordoned_devices({CORDON: "GPU-3"}) == ()
    assert cordoned_devices({REGISTER: "GPU-0,10,15360,100,T4,0,true:", CORDON: "GPU-0"}) == ()
