"""The Volcano dialects: requests, annotations and container setup; the checklist by number."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from shared.dialects import DIALECTS
from shared.dialects.advertised import Strategy
from shared.dialects.dialect import ContainerManifest, Paths, PodManifest, Rules
from shared.dialects.pod_requests import parse_pod_request
from shared.dialects.volcano.device_register import encode_register, parse_register
from shared.dialects.volcano.gpushare import MAX_UNITS, amount_changes
from shared.model.device import Device, DeviceMode, required_memory_mib
from shared.model.errors import RequestError
from shared.model.lease import Lease, Share, bookings
from shared.model.lease_copy import dump_lease, load_lease
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.request import DeviceOrder, GpuRequest

VGPU = DIALECTS["volcano-vgpu"]
SHARE = DIALECTS["volcano-gpushare"]
PATHS = Paths(library="/opt/l/libvgpu.so", preload="/opt/l/preload", containers="/var/c")


def manifest_of(*containers: ContainerManifest, **annotations: str) -> PodManifest:
    return PodManifest(namespace=Namespace("ns"), containers=containers, annotations=annotations)


def vgpu(name: str = "c", /, **amounts: int) -> ContainerManifest:
    limits = {f"volcano.sh/vgpu-{key.replace('_', '-')}": n for key, n in amounts.items()}
    return ContainerManifest(name=name, limits=limits)


def gpushare(name: str = "c", *, init: bool = False, **amounts: int) -> ContainerManifest:
    limits = {f"volcano.sh/gpu-{key}": n for key, n in amounts.items()}
    return ContainerManifest(name=name, limits=limits, init=init)


def device(index: int, memory_mib: int, *, unit_mib: int = 1, healthy: bool = True) -> Device:
    return Device(
        uuid=DeviceUuid(f"GPU-{index}"),
        index=index,
        model="Tesla T4",
        memory_mib=memory_mib,
        slots=10,
        unit_mib=unit_mib,
        healthy=healthy,
    )


def share(container: str, gpu: str, memory: int, cores: int, index: int = 0) -> Share:
    return Share(
        container=container,
        device=DeviceUuid(gpu),
        index=index,
        memory_mib=memory,
        cores_percent=cores,
    )


def lease(*shares: Share, dialect: str = "volcano-vgpu") -> Lease:
    return Lease(
        pod=PodUid("u1"),
        namespace=Namespace("ns"),
        name="train",
        node=NodeName("gpu-a"),
        shares=shares,
        dialect=dialect,
    )


def test_item_1_eight_gpus_of_11178_mib_show_89424_memory_and_8_gpus() -> None:
    shown = SHARE.advertise([device(n, 11178) for n in range(8)], Strategy.AUTO)

    assert shown.node_status == {"volcano.sh/gpu-memory": 89424, "volcano.sh/gpu-number": 8}
    assert shown.served.keys() == {"leasehold.dev/share"}
    assert len({entry.id for entry in shown.served["leasehold.dev/share"]}) == 800


def test_item_2_number_mode_still_publishes_memory_of_zero() -> None:
    shown = SHARE.advertise([device(0, 11178)], Strategy.NUMBER)

    assert [entry.id for entry in shown.served["volcano.sh/gpu-number"]] == ["GPU-0"]
    assert shown.node_status == {"volcano.sh/gpu-memory": 0}


def test_item_3_a_bound_share_carries_its_index_and_nanoseconds() -> None:
    notes = SHARE.binding_annotations(lease(share("c", "GPU-0", 1024, 0)), 1593764466.550835304)

    assert notes["volcano.sh/gpu-index"] == "0"
    assert re.fullmatch(r"\d{19}", notes["volcano.sh/predicate-time"])


def test_item_5_init_containers_of_5000_and_3000_need_5000() -> None:
    request = parse_pod_request(
        manifest_of(gpushare("a", init=True, memory=5000), gpushare("b", init=True, memory=3000)),
        Rules(),
    )
    shares = [
        Share(
            container=c.container,
            device=DeviceUuid("GPU-0"),
            index=0,
            memory_mib=required_memory_mib(c, device(0, 11178)),
            cores_percent=0,
            init=c.init,
            slotted=c.slotted,
        )
        for c in request.containers
    ]

    assert request.same_device
    assert [booking.memory_mib for booking in bookings(shares)] == [5000]


def test_item_7_whole_gpus_are_written_in_ascending_order() -> None:
    request = parse_pod_request(manifest_of(gpushare(number=2)), Rules())
    notes = SHARE.binding_annotations(
        lease(share("c", "GPU-5", 1, 0, 5), share("c", "GPU-2", 1, 0, 2)), 1.0
    )

    assert request.containers == (GpuRequest(container="c", gpus=2, whole=True, slotted=False),)
    assert request.device_order is DeviceOrder.FIRST
    assert notes["volcano.sh/gpu-index"] == "2,5"


def test_item_8_the_environment_is_the_guides_three_variables() -> None:
    card = device(0, 11178, unit_mib=10)
    memory = required_memory_mib(GpuRequest(container="c", gpus=1, memory_units=1024), card)
    held = lease(
        Share(
            container="c",
            device=card.uuid,
            index=0,
            memory_mib=memory,
            cores_percent=0,
            unit_mib=10,
            slotted=False,
        )
    )

    setup = SHARE.container_setup(held, "c", {card.uuid: card}, PATHS)

    assert setup.environment == {
        "NVIDIA_VISIBLE_DEVICES": "0",
        "VOLCANO_GPU_ALLOCATED": "10240",
        "VOLCANO_GPU_MEMORY_TOTAL": "11178",
    }
    assert setup.mounts == ()


def test_item_9_a_pod_is_marked_assigned_once_all_its_containers_are() -> None:
    held = lease(share("a", "GPU-0", 1, 0), share("b", "GPU-0", 1, 0))

    assert SHARE.allocated_annotations(held, frozenset({"a"})) == {}
    assert SHARE.allocated_annotations(held, frozenset({"a", "b"})) == {
        "volcano.sh/gpu-assigned": "true"
    }


def test_item_10_memory_counts_where_both_are_requested() -> None:
    request = parse_pod_request(manifest_of(gpushare(memory=1024, number=2)), Rules())

    assert [(c.gpus, c.memory_units) for c in request.containers] == [(1, 1024)]


def test_item_12_the_register_annotation_of_two_t4_is_the_published_one() -> None:
    cards = [
        Device(
            uuid=DeviceUuid(f"GPU-{c * 4}"), index=i, model="Tesla T4", memory_mib=15360, slots=10
        )
        for i, c in ((1, "b"), (0, "a"))
    ]

    assert encode_register(cards) == (
        "GPU-aaaa,10,15360,NVIDIA-Tesla T4,true,hami-core:"
        "GPU-bbbb,10,15360,NVIDIA-Tesla T4,true,hami-core:"
    )


def test_item_13_allocatable_is_gpus_times_split_and_whole_units() -> None:
    shown = VGPU.advertise([device(n, 11178, unit_mib=10) for n in range(2)], Strategy.AUTO)

    assert len(shown.served["volcano.sh/vgpu-number"]) == 20
    assert shown.node_status == {"volcano.sh/vgpu-memory": 2 * 1117, "volcano.sh/vgpu-cores": 200}
    assert all(len(entry.id) <= 63 for entry in shown.served["volcano.sh/vgpu-number"])


def test_item_15_the_health_of_records_with_five_fields_is_ignored() -> None:
    five = parse_register("GPU-a,10,15360,NVIDIA-Tesla T4,false:")
    six = parse_register("GPU-a,10,15360,NVIDIA-Tesla T4,false,mig:garbage:")

    assert [(d.healthy, d.mode) for d in five] == [(True, DeviceMode.HAMI_CORE)]
    assert [(d.healthy, d.mode, d.model) for d in six] == [(False, DeviceMode.MIG, "Tesla T4")]


def test_item_17_too_many_units_name_the_factor_needed() -> None:
    cards = [device(n, 81920) for n in range(8)]

    with pytest.raises(RequestError, match=r"--memory-factor (\d+)") as refused:
        SHARE.advertise(cards, Strategy.SHARE)

    factor = int(re.findall(r"--memory-factor (\d+)", str(refused.value))[0])
    fitting = [device(n, 81920, unit_mib=factor) for n in range(8)]
    units = SHARE.advertise(fitting, Strategy.SHARE).served["volcano.sh/gpu-memory"]
    assert len({entry.id for entry in units}) == 8 * (81920 // factor) <= MAX_UNITS
    with pytest.raises(RequestError):
        SHARE.advertise([device(n, 81920, unit_mib=factor - 1) for n in range(8)], Strategy.SHARE)


@pytest.mark.parametrize(
    ("amounts", "added"),
    [
        ({"volcano.sh/gpu-memory": 1024}, {"leasehold.dev/share": 1}),
        ({"volcano.sh/gpu-memory": 1024, "leasehold.dev/share": 1}, {}),
        ({"volcano.sh/gpu-memory": 1024, "leasehold.dev/share": 0}, {}),
        ({"volcano.sh/gpu-memory": 0}, {}),
        ({"volcano.sh/gpu-number": 1}, {}),
    ],
)
def test_admission_adds_the_trigger_to_containers_with_memory(
    amounts: dict[str, int], added: dict[str, int]
) -> None:
    assert amount_changes(amounts) == added


def test_memory_needs_the_trigger_where_all_containers_request_it() -> None:
    triggered = [
        ContainerManifest(name=name, limits={"volcano.sh/gpu-memory": 10, "leasehold.dev/share": 1})
        for name in "ab"
    ]

    assert parse_pod_request(manifest_of(*triggered), Rules()).triggers == ("leasehold.dev/share",)
    for other in (
        gpushare("b", memory=10),
        replace(triggered[1], limits={**triggered[1].limits, "leasehold.dev/share": 2}),
    ):
        partly = parse_pod_request(manifest_of(triggered[0], other), Rules())
        assert partly.triggers == ("volcano.sh/gpu-memory",)


def test_item_18_two_gpus_are_one_element_with_two_devices() -> None:
    request = parse_pod_request(manifest_of(vgpu(number=2, memory=3000, cores=50)), Rules())
    held = lease(share("c", "GPU-bbbb", 3000, 50, 1), share("c", "GPU-aaaa", 3000, 50, 0))

    notes = VGPU.binding_annotations(held, 1787000000.7)

    assert [(c.gpus, c.memory_units, c.cores_percent) for c in request.containers] == [
        (2, 3000, 50)
    ]
    assert notes["volcano.sh/vgpu-ids-new"] == ("GPU-bbbb,NVIDIA,3000,50:GPU-aaaa,NVIDIA,3000,50:")
    assert notes["volcano.sh/devices-to-allocate"] == notes["volcano.sh/vgpu-ids-new"]


@pytest.mark.parametrize(
    ("amounts", "mib"),
    [
        ({"number": 1}, 32768),
        ({"number": 1, "memory_percentage": 20}, 6553),
        ({"number": 1, "memory_percentage": 33, "memory": 3000}, 10813),
        ({"number": 1, "memory": 3000}, 3000),
    ],
    ids=["item 19", "item 20", "item 21", "plain"],
)
def test_items_19_to_21_memory_is_exact(amounts: dict[str, int], mib: int) -> None:
    request = parse_pod_request(manifest_of(vgpu(**amounts)), Rules())

    assert required_memory_mib(request.containers[0], device(0, 32768)) == mib


@pytest.mark.parametrize(
    ("amounts", "text"),
    [
        ({"number": 1, "cores": 101}, "vgpu-cores must be 0 to 100"),
        ({"number": 0}, "of 1 or more"),
        ({"memory": 3000}, "needs volcano.sh/vgpu-number"),
        ({"number": 1, "memory_percentage": 101}, "must be 1 to 100"),
    ],
    ids=["item 22", "number 0", "item 33", "percentage"],
)
def test_malformed_requests_are_refused_with_container_and_rule(
    amounts: dict[str, int], text: str
) -> None:
    with pytest.raises(RequestError, match=text) as refused:
        parse_pod_request(manifest_of(vgpu("train", **amounts)), Rules())

    assert "container train" in str(refused.value)


def test_item_25_empty_type_entries_are_ignored_and_use_overrides_nouse() -> None:
    both = {"nvidia.com/use-gputype": "V100, ,", "nvidia.com/nouse-gputype": "T4"}
    request = parse_pod_request(manifest_of(vgpu(number=1), **both), Rules())

    assert request.selection.types == ("V100",)
    assert request.selection.not_types == ()


def test_item_26_uuid_lists_are_trimmed() -> None:
    lists = {
        "volcano.sh/vgpu-use-gpuuuid": " GPU-a , GPU-b",
        "volcano.sh/vgpu-nouse-gpuuuid": "GPU-a",
    }
    request = parse_pod_request(manifest_of(vgpu(number=1), **lists), Rules())

    assert request.selection.uuids == ("GPU-a", "GPU-b")
    assert request.selection.not_uuids == ("GPU-a",)


def test_item_28_a_spread_pod_group_becomes_an_anti_affinity_group() -> None:
    notes = {"volcano.sh/vgpu-podgroup-policy": "spread", "scheduling.k8s.io/group-name": "g"}
    request = parse_pod_request(manifest_of(vgpu(number=1), **notes), Rules())

    assert request.anti_affinity_groups == ("ns/g",)


def test_item_29_the_policy_decides_the_order_of_devices() -> None:
    orders = [
        parse_pod_request(manifest_of(vgpu(number=1)), Rules(schedule_policy=p)).device_order
        for p in ("", "binpack", "spread")
    ]

    assert orders == [DeviceOrder.LAST, DeviceOrder.BINPACK, DeviceOrder.SPREAD]


def test_item_30_there_is_an_element_per_container_with_gpus() -> None:
    held = lease(share("a", "GPU-bbbb", 3000, 10), share("b", "GPU-bbbb", 5000, 20))

    notes = VGPU.binding_annotations(held, 1.0)
    setup = VGPU.container_setup(held, "b", {}, PATHS)

    assert notes["volcano.sh/vgpu-ids-new"] == "GPU-bbbb,NVIDIA,3000,10:;GPU-bbbb,NVIDIA,5000,20:"
    assert setup.environment["CUDA_DEVICE_MEMORY_LIMIT_0"] == "5000m"
    assert "/var/c/u1_b" in [mount.host_path for mount in setup.mounts]


def test_item_31_the_binding_has_all_six_keys_in_seconds() -> None:
    notes = VGPU.binding_annotations(lease(share("c", "GPU-a", 1, 0)), 1787000000.9)

    assert notes == {
        "volcano.sh/vgpu-node": "gpu-a",
        "volcano.sh/vgpu-time": "1787000000",
        "volcano.sh/vgpu-ids-new": "GPU-a,NVIDIA,1,0:",
        "volcano.sh/devices-to-allocate": "GPU-a,NVIDIA,1,0:",
        "volcano.sh/bind-phase": "allocating",
        "volcano.sh/bind-time": "1787000000",
    }


def test_item_35_a_container_gets_exactly_the_published_environment_and_mounts() -> None:
    setup = VGPU.container_setup(lease(share("c", "GPU-a", 3000, 50)), "c", {}, PATHS)

    cache = setup.environment["CUDA_DEVICE_MEMORY_SHARED_CACHE"]
    assert re.fullmatch(r"/tmp/vgpu/[0-9a-f-]{36}\.cache", cache)
    assert dict(setup.environment) == {
        "NVIDIA_VISIBLE_DEVICES": "GPU-a",
        "CUDA_DEVICE_MEMORY_LIMIT_0": "3000m",
        "CUDA_DEVICE_SM_LIMIT": "50",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": cache,
        "GPU_CORE_UTILIZATION_POLICY": "force",  # ours, see docs/decisions/0013
        "LIBCUDA_LOG_LEVEL": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "NVIDIA_GDRCOPY": "enabled",
        "NVIDIA_GDS": "enabled",
        "NVIDIA_MOFED": "enabled",
    }
    assert [(m.container_path, m.host_path, m.read_only) for m in setup.mounts] == [
        ("/usr/local/vgpu/libvgpu.so", "/opt/l/libvgpu.so", True),
        ("/tmp/vgpu", "/var/c/u1_c", False),
        ("/tmp/cudevshr.cache", f"/var/c/u1_c/{Path(cache).name}", False),  # ours, likewise
        ("/tmp/vgpulock", "/var/c/u1_c.lock", False),
        ("/overrideEnv", "/var/c/u1_c.env", True),
        ("/etc/ld.so.preload", "/opt/l/preload", True),
    ]


def test_limits_are_in_the_order_in_which_cuda_numbers_devices() -> None:
    held = lease(share("c", "GPU-b", 4000, 30, 1), share("c", "GPU-a", 2000, 30, 0))

    variables = VGPU.container_setup(held, "c", {}, PATHS).environment

    assert variables["NVIDIA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"
    assert variables["CUDA_DEVICE_MEMORY_LIMIT_0"] == "2000m"
    assert variables["CUDA_DEVICE_MEMORY_LIMIT_1"] == "4000m"


def test_a_share_without_memory_is_refused_because_the_library_would_not_limit_it() -> None:
    with pytest.raises(RequestError, match="no memory leased"):
        VGPU.container_setup(lease(share("c", "GPU-a", 0, 50)), "c", {}, PATHS)


def test_item_37_elements_are_emptied_one_by_one_and_the_last_ends_the_phase() -> None:
    held = lease(share("a", "GPU-a", 1, 0), share("b", "GPU-b", 2, 0))

    first = VGPU.allocated_annotations(held, frozenset({"a"}))
    last = VGPU.allocated_annotations(held, frozenset({"a", "b"}))

    assert first == {"volcano.sh/devices-to-allocate": ";GPU-b,NVIDIA,2,0:"}
    assert last == {
        "volcano.sh/devices-to-allocate": ";",
        "volcano.sh/bind-phase": "success",
        "volcano.sh/vgpu-time": "18446744073709551615",
    }


def test_item_38_a_refused_pod_is_marked_failed() -> None:
    assert VGPU.failed_annotations(lease()) == {
        "volcano.sh/bind-phase": "failed",
        "volcano.sh/vgpu-time": "18446744073709551615",
    }


def test_mixed_dialects_are_refused() -> None:
    with pytest.raises(RequestError, match="mixes volcano-vgpu and volcano-gpushare"):
        parse_pod_request(manifest_of(vgpu("a", number=1), gpushare("b", memory=5)), Rules())


def test_a_pod_without_a_gpu_is_a_request_without_one() -> None:
    assert (
        parse_pod_request(
            manifest_of(ContainerManifest(name="c", limits={"cpu": 1})), Rules()
        ).containers
        == ()
    )


def test_a_lease_copy_reads_back_equal() -> None:
    held = lease(share("c", "GPU-a", 3000, 50))

    back = load_lease(dump_lease(held), namespace=held.namespace, name=held.name)

    assert (back.pod, back.node, back.shares) == (held.pod, held.node, held.shares)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format":9}', "null"])
def test_a_malformed_lease_copy_is_refused(text: str) -> None:
    with pytest.raises(RequestError):
        load_lease(text, namespace=Namespace("ns"), name="p")
