"""What pods and nodes show in each dialect: annotations, lists of IDs, node status, registers."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec import structs

from shared.dialects import DIALECTS
from shared.dialects.advertised import Strategy
from shared.dialects.nvidia.annotations import cordoned_devices, encode_devices
from shared.dialects.volcano.device_register import (
    encode_register,
    is_gone,
    parse_register,
    reported,
)
from shared.dialects.volcano.gpushare import MAX_UNITS
from shared.model.devices.device import Device, DeviceMode, MigLayout, MigProfile
from shared.model.errors import RequestError
from shared.model.leases.lease import MIB, Lease, MigPlacement, bookings
from shared.model.leases.lease_copy import dump_lease, load_lease
from shared.model.names import DeviceUuid, Namespace
from tests.support.dialects.builders import (
    container_with,
    device,
    gpushare,
    hami,
    koord,
    lease_of,
    leased,
    leased_on,
    pod,
    read,
    share,
    vcuda,
    vgpu,
)

NOW = 1787000000.9
NANOSECONDS = str(int(NOW * 1e9))
SHARE = hami(gpu=1, gpumem=4096, gpucores=30)
ONE = "GPU-0,NVIDIA,4096,30:"
REGISTER = "hami.io/node-nvidia-register"
CORDON = "hami.io/device-cordon"
HAMI = DIALECTS["nvidia"]
INSTANCE = MigPlacement(layout="group1", position=2, profile="1g.10gb")
BOUND: dict[str, tuple[str, Lease, dict[str, str]]] = {
    "item 31 the binding has all six keys in seconds": (
        "volcano-vgpu",
        lease_of(share("c", "GPU-a", 1, 0)),
        {
            "volcano.sh/vgpu-node": "gpu-a",
            "volcano.sh/vgpu-time": "1787000000",
            "volcano.sh/vgpu-ids-new": "GPU-a,NVIDIA,1,0:",
            "volcano.sh/devices-to-allocate": "GPU-a,NVIDIA,1,0:",
            "volcano.sh/bind-phase": "allocating",
            "volcano.sh/bind-time": "1787000000",
        },
    ),
    "item 3 a bound share carries its index and nanoseconds": (
        "volcano-gpushare",
        lease_of(share("c", "GPU-0", 1024, 0)),
        {"volcano.sh/gpu-index": "0", "volcano.sh/predicate-time": NANOSECONDS},
    ),
    "item 7 whole gpus are written in ascending order": (
        "volcano-gpushare",
        lease_of(share("c", "GPU-5", 1, 0, 5), share("c", "GPU-2", 1, 0, 2)),
        {"volcano.sh/gpu-index": "2,5", "volcano.sh/predicate-time": NANOSECONDS},
    ),
    "gpu-manager": (
        "tencent",
        leased(pod(vcuda(core=200)), (5, 2)),
        {
            "tencent.com/predicate-gpu-idx-0": "2,5",
            "tencent.com/predicate-node": "gpu-a",
            "tencent.com/predicate-time": NANOSECONDS,
            "tencent.com/gpu-assigned": "false",
        },
    ),
    "gpusharing 7 containers without gpus count, and init containers do not": (
        "tencent",
        leased(
            pod(
                container_with("warm", limits=vcuda(core=10, memory=2), init=True),
                container_with("plain"),
                container_with("main", limits=vcuda(core=50, memory=4)),
            ),
            *((2,), (2,)),
        ),
        {
            "tencent.com/predicate-gpu-idx-1": "2",
            "tencent.com/predicate-node": "gpu-a",
            "tencent.com/predicate-time": NANOSECONDS,
            "tencent.com/gpu-assigned": "false",
        },
    ),
    "hami": (
        "nvidia",
        leased(pod(SHARE), (0,)),
        {
            "hami.io/vgpu-node": "gpu-a",
            "hami.io/vgpu-time": "1787000000",
            "hami.io/vgpu-devices-to-allocate": f"{ONE};",
            "hami.io/vgpu-devices-allocated": f"{ONE};",
            "hami.io/bind-time": "1787000000",
            "hami.io/bind-phase": "allocating",
        },
    ),
}


@pytest.mark.parametrize(("dialect", "lease", "notes"), BOUND.values(), ids=BOUND)
def test_a_binding_has_its_vendors_annotations(
    dialect: str, lease: Lease, notes: dict[str, str]
) -> None:
    assert len(NANOSECONDS) == 19
    assert DIALECTS[dialect].binding_annotations(lease, NOW) == notes


IDS: dict[str, tuple[Lease, str]] = {
    "item 18 two gpus are one element with two devices": (
        lease_of(share("c", "GPU-b", 3000, 50, 1), share("c", "GPU-a", 3000, 50, 0)),
        "GPU-b,NVIDIA,3000,50:GPU-a,NVIDIA,3000,50:",
    ),
    "item 30 there is an element per container with gpus": (
        lease_of(share("a", "GPU-b", 3000, 10), share("b", "GPU-b", 5000, 20)),
        "GPU-b,NVIDIA,3000,10:;GPU-b,NVIDIA,5000,20:",
    ),
}


@pytest.mark.parametrize(("lease", "ids"), IDS.values(), ids=IDS)
def test_volcanos_list_of_devices(lease: Lease, ids: str) -> None:
    notes = DIALECTS["volcano-vgpu"].binding_annotations(lease, NOW)

    assert notes["volcano.sh/vgpu-ids-new"] == notes["volcano.sh/devices-to-allocate"] == ids


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("a", f"{ONE};"),
        ("a-", f"{ONE};;"),
        ("-a", f";{ONE};"),
        ("ab", f"{ONE};GPU-1,NVIDIA,4096,30:;"),
        ("-a-b-", f";{ONE};;GPU-1,NVIDIA,4096,30:;;"),
    ],
)
def test_hamis_list_has_an_element_for_every_container(names: str, text: str) -> None:
    containers = [
        container_with(f"plain{n}") if name == "-" else container_with(name, limits=SHARE)
        for n, name in enumerate(names)
    ]
    places = [(index,) for index in range(len(names.replace("-", "")))]

    assert encode_devices(leased(pod(*containers), *places)) == text


def test_hamis_published_list_is_written_and_kept_in_the_copy_of_the_lease() -> None:
    two = container_with("main", limits=SHARE | hami(gpu=2))
    held = leased(pod(container_with("init", init=True), two), (0, 1))
    back = load_lease(dump_lease(held), namespace=held.namespace, name=held.name)

    assert encode_devices(held) == encode_devices(back) == f";{ONE}GPU-1,NVIDIA,4096,30:;"


def test_hamis_list_names_an_instance_after_its_place() -> None:
    held = leased(pod(SHARE), (0,))
    held = structs.replace(held, shares=(structs.replace(held.shares[0], mig=INSTANCE),))

    assert encode_devices(held) == "GPU-0[group1-2],NVIDIA,4096,30:;"


def test_gpu_managers_indices_are_kept_in_the_copy_of_the_lease() -> None:
    held = leased(pod(container_with("plain"), container_with("m", limits=vcuda(core=100))), (4,))
    back = load_lease(dump_lease(held), namespace=held.namespace, name=held.name)

    notes = DIALECTS["tencent"].binding_annotations(back, NOW)
    assert notes["tencent.com/predicate-gpu-idx-1"] == "4"
    assert not leased(pod(vcuda(core=100)), (4,)).memo, "the shares are enough"


TWO = lease_of(share("a", "GPU-a", 1, 0), share("b", "GPU-b", 2, 0))
ALLOCATED: dict[str, tuple[str, Lease, dict[str, str], dict[str, str], dict[str, str]]] = {
    "item 37 and 38 elements are emptied one by one and the last ends the phase": (
        "volcano-vgpu",
        TWO,
        {"volcano.sh/devices-to-allocate": ";GPU-b,NVIDIA,2,0:"},
        {
            "volcano.sh/devices-to-allocate": ";",
            "volcano.sh/bind-phase": "success",
            "volcano.sh/vgpu-time": "18446744073709551615",
        },
        {"volcano.sh/bind-phase": "failed", "volcano.sh/vgpu-time": "18446744073709551615"},
    ),
    "item 9 a pod is marked assigned once all its containers are": (
        *("volcano-gpushare", TWO, {}, {"volcano.sh/gpu-assigned": "true"}, {}),
    ),
    "gpu-manager": ("tencent", TWO, {}, {"tencent.com/gpu-assigned": "true"}, {}),
    "hami": (
        "nvidia",
        leased(pod(SHARE, SHARE), (0,), (1,)),
        {"hami.io/vgpu-devices-to-allocate": ";GPU-1,NVIDIA,4096,30:;"},
        {"hami.io/vgpu-devices-to-allocate": ";;", "hami.io/bind-phase": "success"},
        {"hami.io/bind-phase": "failed"},
    ),
}


@pytest.mark.parametrize(
    ("dialect", "lease", "first", "last", "failed"), ALLOCATED.values(), ids=ALLOCATED
)
def test_annotations_follow_the_calls_of_allocate(
    dialect: str,
    lease: Lease,
    first: dict[str, str],
    last: dict[str, str],
    failed: dict[str, str],
) -> None:
    shown = DIALECTS[dialect]

    assert shown.allocated_annotations(lease, frozenset("a")) == first
    assert shown.allocated_annotations(lease, frozenset("ab")) == last
    assert shown.failed_annotations(lease) == failed


LAYOUT = MigLayout(name="g", profiles=(MigProfile(name="1g.10gb", memory_mib=9728, count=7),))
EIGHT = [device(n, 11178) for n in range(8)]
MIG = device(9, 40960, mode=DeviceMode.MIG)
SHOWN: dict[str, tuple[str, str, Sequence[Device], str, tuple[int, int], dict[str, int]]] = {
    "item 1 eight gpus of 11178 mib show 89424 memory and 8 gpus": (
        *("volcano-gpushare", Strategy.AUTO, EIGHT, "leasehold.dev/share", (800, 800)),
        gpushare(memory=89424, number=8),
    ),
    "item 2 number mode still publishes memory of zero": (
        *("volcano-gpushare", Strategy.NUMBER, EIGHT[:1], "volcano.sh/gpu-number", (1, 1)),
        gpushare(memory=0),
    ),
    "item 13 allocatable is gpus times split and whole units": (
        *("volcano-vgpu", Strategy.AUTO, [device(n, 11178, unit_mib=10) for n in range(2)]),
        *("volcano.sh/vgpu-number", (20, 20), vgpu(memory=2 * 1117, cores=200)),
    ),
    "hundredths, and the blocks of all the memory, floored once": (
        *("tencent", Strategy.AUTO, [*EIGHT, MIG], "tencent.com/vcuda-core", (800, 800)),
        vcuda(memory=8 * 11178 // 256),
    ),
    "an unhealthy gpu keeps its ids and loses its blocks": (
        *("tencent", Strategy.AUTO, [device(0, 1024, healthy=False), device(1, 2048)]),
        *("tencent.com/vcuda-core", (200, 100), vcuda(memory=8)),
    ),
    "hami": (
        *("nvidia", Strategy.AUTO),
        [
            device(0, 11178, unit_mib=10),
            device(1, 11178, unit_mib=10, healthy=False),
            device(2, 81920, unit_mib=10, mode=DeviceMode.MIG, layouts=(LAYOUT,)),
        ],
        *("nvidia.com/gpu", (27, 17), hami(gpumem=1117 + 8192, gpucores=200)),
    ),
    "koordinator": (
        *("koordinator", Strategy.AUTO),
        [device(0, 15360), device(1, 15360), device(2, 15360, healthy=False), MIG],
        *("koordinator.sh/gpu.shared", (300, 200)),
        koord(gpu=200, core=200, memory=2 * 15360 * MIB, ratio=200),
    ),
}


@pytest.mark.parametrize(
    ("dialect", "strategy", "devices", "resource", "counts", "status"), SHOWN.values(), ids=SHOWN
)
def test_a_node_serves_ids_and_shows_amounts(
    dialect: str,
    strategy: str,
    devices: Sequence[Device],
    resource: str,
    counts: tuple[int, int],
    *,
    status: Mapping[str, int],
) -> None:
    shown = DIALECTS[dialect].advertise(devices, strategy)
    ids = shown.served[resource]

    assert shown.served.keys() == {resource}
    assert shown.node_status == status
    assert (len({each.id for each in ids}), sum(each.healthy for each in ids)) == counts


BLOCKS = leased(pod(vcuda(core=30, memory=4)), (0,))
UNITS = leased_on(read(gpushare(memory=1024)), (device(0, 11178),))


@pytest.mark.parametrize(
    ("dialect", "lease", "resource", "count"),
    [
        ("tencent", BLOCKS, "tencent.com/vcuda-core", 30),
        ("volcano-gpushare", UNITS, "volcano.sh/gpu-memory", 1024),
        ("volcano-gpushare", UNITS, "leasehold.dev/share", 1),
    ],
)
def test_a_share_has_an_id_for_each_part_that_is_served(
    dialect: str, lease: Lease, resource: str, count: int
) -> None:
    assert DIALECTS[dialect].id_count(lease.shares[0], resource) == count


@pytest.mark.parametrize("dialect", DIALECTS)
def test_ids_of_a_real_uuid_are_short_enough_for_a_kubelet(dialect: str) -> None:
    card = device(uuid=DeviceUuid("GPU-57047317-c2d0-b5bd-37b9-522cf6d24591"))

    (ids,) = DIALECTS[dialect].advertise([card], Strategy.AUTO).served.values()

    assert max(len(each.id) for each in ids) <= 63


def test_item_17_too_many_units_name_the_factor_needed() -> None:
    def units(factor: int) -> set[str]:
        cards = [device(n, 81920, unit_mib=factor) for n in range(8)]
        shown = DIALECTS["volcano-gpushare"].advertise(cards, Strategy.SHARE)
        return {each.id for each in shown.served["volcano.sh/gpu-memory"]}

    with pytest.raises(RequestError, match=r"--memory-factor (\d+)") as refused:
        units(1)

    factor = int(str(refused.value).partition("--memory-factor ")[2].split()[0])
    assert len(units(factor)) == 8 * (81920 // factor) <= MAX_UNITS
    with pytest.raises(RequestError):
        units(factor - 1)


def test_item_12_the_register_annotation_of_two_t4_is_the_published_one() -> None:
    cards = [device(1, 15360, uuid=DeviceUuid("GPU-bbbb")), device(0, 15360, uuid="GPU-aaaa")]

    assert encode_register(cards) == (
        "GPU-aaaa,10,15360,NVIDIA-Tesla T4,true,hami-core:"
        "GPU-bbbb,10,15360,NVIDIA-Tesla T4,true,hami-core:"
    )


@pytest.mark.parametrize(
    ("text", "healthy", "mode"),
    [
        ("GPU-a,10,15360,NVIDIA-Tesla T4,false:", True, DeviceMode.HAMI_CORE),
        ("GPU-a,10,15360,NVIDIA-Tesla T4,false,mig:garbage:", False, DeviceMode.MIG),
    ],
)
def test_item_15_the_health_of_records_with_five_fields_is_ignored(
    text: str, healthy: bool, mode: DeviceMode
) -> None:
    (found,) = parse_register(text)

    assert (found.healthy, found.mode, found.model) == (healthy, mode, "Tesla T4")


def test_hamis_register_has_a_record_per_device_without_what_is_zero() -> None:
    cards = [
        device(0, 15360),
        device(1, 81920, model="A100", numa=1, mode=DeviceMode.MIG, healthy=False, unit_mib=10),
    ]
    notes = HAMI.advertise(cards, Strategy.AUTO).annotations
    both: dict[str, Any] = {"count": 10, "devcore": 100}

    assert json.loads(notes[REGISTER] or "") == [
        both
        | {"id": "GPU-0", "devmem": 15360, "type": "NVIDIA-Tesla T4"}
        | {"mode": "hami-core", "health": True},
        both
        | {"id": "GPU-1", "index": 1, "devmem": 81920, "type": "NVIDIA-A100"}
        | {"numa": 1, "mode": "mig"},
    ]
    assert notes["hami.io/node-nvidia-score"] is None


def test_hami_link_scores_are_advertised_where_they_are_known() -> None:
    cards = [device(n, links={DeviceUuid(f"GPU-{1 - n}"): 160}) for n in range(2)]
    notes = HAMI.advertise(cards, Strategy.AUTO).annotations

    assert json.loads(notes["hami.io/node-nvidia-score"] or "") == [
        {"uuid": "GPU-0", "score": {"GPU-1": 160}},
        {"uuid": "GPU-1", "score": {"GPU-0": 160}},
    ]


def test_hami_a_register_of_sixteen_devices_is_far_below_what_annotations_may_hold() -> None:
    links = {DeviceUuid(f"GPU-{m}" + 36 * "0"): 1860 for m in range(16)}
    written = HAMI.advertise([device(n, 196608, links=links) for n in range(16)], Strategy.AUTO)

    assert sum(len(text or "") for text in written.annotations.values()) < 32 * 1024


def test_hami_cordoned_devices_are_found_by_uuid() -> None:
    register = HAMI.advertise([device(n) for n in range(4)], Strategy.AUTO).annotations[REGISTER]
    notes = {REGISTER: register or "", CORDON: " GPU-3 ,GPU-0,GPU-9,"}

    assert sorted(cordoned_devices(notes)) == [0, 3]
    assert cordoned_devices({CORDON: "GPU-3"}) == {}
    assert cordoned_devices({REGISTER: "GPU-0,10,15360,100,T4,0,true:", CORDON: "GPU-0"}) == {}


def test_item_5_init_containers_of_5000_and_3000_need_5000() -> None:
    asked = (
        container_with(name, limits=gpushare(memory=memory), init=True)
        for name, memory in (("a", 5000), ("b", 3000))
    )
    card = (device(0, 11178),)

    assert [one.memory_mib for one in bookings(leased_on(read(*asked), card, card).shares)] == [
        5000
    ]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format":9}', "null", '{"format":1}'])
def test_a_malformed_lease_copy_is_refused(text: str) -> None:
    with pytest.raises(RequestError):
        load_lease(text, namespace=Namespace("ns"), name="p")


@pytest.mark.parametrize(
    "share",
    [
        share("c", "GPU-a", 3000, 50),
        share("c", "GPU-a", 3000, 0, mig=INSTANCE, slot=2, share_id="s", fence=7),
    ],
)
def test_a_lease_copy_reads_back_equal(share: Any) -> None:
    held = structs.replace(lease_of(share), state="bound", version=3)

    assert load_lease(dump_lease(held), namespace=held.namespace, name=held.name) == held


def test_a_lease_copy_of_a_device_without_memory_is_refused() -> None:
    held = lease_of(structs.replace(share("c", "GPU-a", 0, 0), device_mib=0))

    with pytest.raises(RequestError, match="no device has 0 MiB"):
        load_lease(dump_lease(held), namespace=held.namespace, name=held.name)


REPORTED = datetime(2026, 8, 20, 10, 7, 21, 123456, tzinfo=UTC).timestamp()


def test_item_14_a_report_is_gos_default_time_text_in_utc() -> None:
    assert reported(REPORTED) == "Reported 2026-08-20 10:07:21.123456 +0000 UTC"


@pytest.mark.parametrize(
    ("text", "gone"),
    [
        (None, False),
        ("Reported 2020-01-01 00:00:00 +0000 UTC m=+3.0", False),
        ("Requesting_2026.08.20 10:06:22", False),
        ("Requesting_2026.08.20 10:06:20", True),
        ("Requesting_soon", True),
        ("Deleted_2026.08.20 10:07:20", True),
    ],
)
def test_item_16_a_handshake_request_without_a_report_for_a_minute_means_that_the_plugin_is_gone(
    text: str | None, gone: bool
) -> None:
    assert is_gone(text, REPORTED) is gone
