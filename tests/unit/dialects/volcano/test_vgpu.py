"""Volcano vGPU: requests, annotations and container setup; the checklist by number."""

import re
from pathlib import Path

import pytest

from shared.dialects.advertised import Strategy
from shared.dialects.dialect import ContainerManifest, Rules
from shared.dialects.pod_requests import parse_pod_request
from shared.dialects.volcano.device_register import encode_register, parse_register
from shared.model.device import Device, DeviceMode, required_memory_mib
from shared.model.errors import RequestError
from shared.model.lease_copy import dump_lease, load_lease
from shared.model.names import DeviceUuid, Namespace
from shared.model.request import DeviceOrder
from tests.support.dialects.builders import PATHS, device
from tests.support.dialects.volcano import VGPU, gpushare, lease, manifest_of, share, vgpu


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
        "GPU_CORE_UTILIZATION_POLICY": "force",  # ours, see docs/decisions/0012
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
