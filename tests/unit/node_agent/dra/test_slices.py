"""What a ResourceSlice offers of devices, beside what leases hold."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from services.node_agent.dra.slices import (
    ClaimableNode,
    build_slices,
    find_dropped_fields,
    is_current,
    mib_quantity,
    nvlink_groups,
)
from services.node_agent.mig.instances import InstanceProfile
from shared.model.devices.device import Device, DeviceMode, Isolation, MigLayout, MigProfile
from shared.model.leases.lease import ClaimAllocation, Lease, MigPlacement
from shared.model.names import DeviceUuid, NodeName, PodUid
from shared.model.requests.claim import TaintEffect
from shared.model.requests.request import SharingPolicy
from tests.support.node_agent.agent import lease_of, share

GPU = Device(
    uuid=DeviceUuid("GPU-A"),
    index=0,
    model="Tesla T4",
    memory_mib=15_360,
    slots=10,
    pcie="pci0000:3a",
    numa=1,
)


NODE = ClaimableNode(
    name=NodeName("node"), uid="uid", devices=(GPU,), leases=(), driver_version="535.104.05"
)


def lease(*, claim: bool = False, generation: str = "g", **changes: Any) -> Lease:
    allocation = ClaimAllocation(generation=generation) if claim else None
    return lease_of("holder", share(device=GPU.uuid, **changes), claim=allocation)


def offered(
    device: Device = GPU,
    *leases: Lease,
    deallocated: Sequence[tuple[PodUid, str]] = (),
    taint_effect: TaintEffect = TaintEffect.NO_SCHEDULE,
) -> list[dict[str, Any]]:
    node = replace(NODE, devices=(device,), leases=leases, taint_effect=taint_effect)
    [found] = build_slices(node, generation=1, deallocated=deallocated)
    devices: list[dict[str, Any]] = found["spec"]["devices"]
    return devices


def capacity(device: Device, *leases: Lease, **more: Any) -> dict[str, str]:
    [found] = offered(device, *leases, **more)
    return {name: each["value"] for name, each in found["capacity"].items()}


def test_a_shared_device_has_policies_and_the_whole_memory_by_default() -> None:
    [device] = offered()

    assert device["allowMultipleAllocations"] is True
    assert device["bindingConditions"] == ["leasehold.dev/Leased"]
    policy = device["capacity"]["memory"]["requestPolicy"]
    assert policy == {"default": "15Gi", "validRange": {"min": "512Mi", "step": "1Mi"}}
    assert device["attributes"]["driverVersion"] == {"version": "535.104.5"}
    assert device["attributes"]["resource.kubernetes.io/pcieRoot"] == {"string": "pci0000:3a"}
    assert device["attributes"]["resource.kubernetes.io/numaNode"] == {"int": 1}


def test_leases_of_pods_are_subtracted_and_those_of_claims_are_not() -> None:
    of_pod = lease(memory_mib=5000, cores_percent=40)
    of_claim = lease(claim=True, memory_mib=5000, cores_percent=40)

    assert capacity(GPU, of_pod) == {"memory": "10360Mi", "cores": "60", "slots": "9"}
    assert capacity(GPU, of_claim) == {"memory": "15Gi", "cores": "100", "slots": "10"}


def test_an_allocation_that_its_claim_has_no_more_is_subtracted() -> None:
    held = lease(claim=True, generation="old", memory_mib=5000, cores_percent=0)

    assert capacity(GPU, held, deallocated=[(held.pod, "old")])["memory"] == "10360Mi"
    assert capacity(GPU, held, deallocated=[(held.pod, "new")])["memory"] == "15Gi"


def test_the_default_stays_the_whole_memory_so_that_no_whole_device_is_promised() -> None:
    [device] = offered(GPU, lease(memory_mib=5000, cores_percent=100 - 1))

    assert device["capacity"]["memory"]["requestPolicy"]["default"] == "15Gi"
    assert device["capacity"]["cores"]["requestPolicy"]["validRange"]["max"] == "1"


STRICT = replace(GPU, isolation=Isolation.STRICT)


@pytest.mark.parametrize(
    ("device", "held"),
    [
        (GPU, lease(memory_mib=15_359)),
        (GPU, lease(cores_percent=100)),
        (GPU, lease(sharing=SharingPolicy.EXCLUSIVE)),
        (GPU, lease(claim=True, cores_percent=100)),
        (STRICT, lease(memory_mib=1)),
        (replace(GPU, mode=DeviceMode.MIG), lease(claim=True)),
    ],
)
def test_a_device_of_which_nothing_can_be_leased_is_left_out(device: Device, held: Lease) -> None:
    assert offered(device, held) == []


def test_a_device_of_strict_isolation_is_offered_whole() -> None:
    [device] = offered(STRICT)

    assert "allowMultipleAllocations" not in device
    assert device["capacity"] == {"memory": {"value": "15Gi"}, "cores": {"value": "100"}}


@pytest.mark.parametrize("effect", ["NoSchedule", "NoExecute"])
def test_an_unhealthy_device_is_tainted_with_its_fault(effect: str) -> None:
    sick = replace(GPU, healthy=False, fault="XID 79: GPU has fallen off the bus")

    [device] = offered(sick, taint_effect=TaintEffect(effect))

    assert device["taints"] == [
        {
            "key": "leasehold.dev/unhealthy",
            "value": "XID-79-GPU-has-fallen-off-the-bus",
            "effect": effect,
        }
    ]


@pytest.mark.parametrize(
    ("mib", "text"), [(81_920, "80Gi"), (15_360, "15Gi"), (1000, "1000Mi"), (1 << 20, "1Ti")]
)
def test_quantities_are_as_the_api_server_writes_them(mib: int, text: str) -> None:
    assert mib_quantity(mib) == text


def test_devices_with_nvlinks_are_one_group() -> None:
    def linked(name: str, index: int, *others: str, score: int = 140) -> Device:
        links = {DeviceUuid(other): score for other in others}
        return replace(GPU, uuid=DeviceUuid(name), index=index, links=links)

    found = nvlink_groups(
        [
            linked("b", 1, "a", "c"),
            linked("a", 0, "b"),
            linked("c", 2, "b"),
            linked("d", 3, "a", score=40),
        ]
    )

    assert found == {"a": 0, "b": 0, "c": 0}


def test_dropped_fields_are_found_and_a_taints_time_is_no_difference() -> None:
    [device] = offered(replace(GPU, healthy=False, fault="xid 79"))
    wanted = {"nodeName": "node", "pool": {"generation": 2}, "devices": [device]}
    stored_device = {
        **device,
        "taints": [{**device["taints"][0], "timeAdded": "2026-11-23T02:42:03Z"}],
    }
    stored = {**wanted, "pool": {"generation": 1}, "devices": [stored_device]}

    assert is_current(wanted, stored)
    assert find_dropped_fields(wanted, stored) == frozenset()
    del stored_device["bindingConditions"]
    assert find_dropped_fields(wanted, stored) == {"bindingConditions"}
    assert not is_current(wanted, stored)


# MIG instances

SMALL, LARGE = (
    MigProfile(name="1g.5gb", memory_mib=5120, count=2),
    MigProfile(name="3g.20gb", memory_mib=20_480, count=1),
)
A100 = replace(
    GPU,
    memory_mib=40_960,
    mode=DeviceMode.MIG,
    layouts=(
        MigLayout(name="group1", profiles=(SMALL,)),
        MigLayout(name="group2", profiles=(LARGE, replace(SMALL, count=1))),
    ),
)
PROFILES = tuple(
    InstanceProfile(
        id=number,
        name=name,
        memory_mib=1,
        compute_slices=compute,
        memory_slices=slices,
        count=2,
        starts=starts,
    )
    for number, (name, compute, slices, starts) in enumerate(
        [("1g.5gb", 1, 1, tuple(range(7))), ("3g.20gb", 3, 4, (0, 4))]
    )
)
NAMES = ["gpu-a-group1-0", "gpu-a-group1-1", "gpu-a-group2-0", "gpu-a-group2-1"]


def slices(*leases: Lease, devices: tuple[Device, ...] = (A100,)) -> list[dict[str, Any]]:
    profiles = {device.uuid: PROFILES for device in devices}
    node = replace(NODE, devices=devices, leases=leases, profiles=profiles)
    return [each["spec"] for each in build_slices(node, generation=1)]


def names(*leases: Lease) -> list[str]:
    return [device["name"] for device in slices(*leases)[0]["devices"]]


def instance(layout: str, position: int, *, claim: bool = False) -> Lease:
    place = MigPlacement(layout=layout, position=position, profile="1g.5gb")
    return lease(claim=claim, mig=place)


def test_every_instance_of_every_layout_takes_its_memory_slices() -> None:
    devices, counters = slices()

    assert devices["pool"] == counters["pool"]
    assert devices["pool"]["resourceSliceCount"] == 2
    [shared] = counters["sharedCounters"]
    assert shared["name"] == "gpu-a"
    assert shared["counters"].keys() == {f"memory-slice-{number}" for number in range(8)}
    taken = {
        device["name"]: sorted(device["consumesCounters"][0]["counters"])
        for device in devices["devices"]
    }
    assert taken == {
        "gpu-a-group1-0": ["memory-slice-0"],
        "gpu-a-group1-1": ["memory-slice-1"],
        "gpu-a-group2-0": [f"memory-slice-{number}" for number in range(4)],
        "gpu-a-group2-1": ["memory-slice-4"],
    }
    large = devices["devices"][2]
    assert large["attributes"]["profile"] == {"string": "3g.20gb"}
    assert large["attributes"]["type"] == {"string": "mig"}
    assert large["capacity"] == {"memory": {"value": "20Gi"}}
    assert large["bindingConditions"] == ["leasehold.dev/Leased"]
    assert "allowMultipleAllocations" not in large


def test_a_lease_leaves_the_other_instances_of_its_layout() -> None:
    assert names() == NAMES
    assert names(instance("group2", 1)) == ["gpu-a-group2-0"]
    assert names(instance("group1", 0, claim=True)) == ["gpu-a-group1-0", "gpu-a-group1-1"]


def test_layouts_without_known_starts_have_no_counters() -> None:
    present = replace(A100, layouts=(MigLayout(name="present", profiles=(SMALL,)),))

    [only] = build_slices(replace(NODE, devices=(present,)), generation=1)

    assert [device["name"] for device in only["spec"]["devices"]] == [
        "gpu-a-present-0",
        "gpu-a-present-1",
    ]
    assert "consumesCounters" not in only["spec"]["devices"][0]


def test_a_slice_has_at_most_64_devices_and_8_sets_of_counters() -> None:
    gpus = tuple(replace(A100, uuid=DeviceUuid(f"GPU-{n}"), index=n) for n in range(17))

    found = slices(devices=gpus)

    assert [len(each.get("devices", ())) for each in found] == [64, 4, 0, 0, 0]
    assert [len(each.get("sharedCounters", ())) for each in found] == [0, 0, 8, 8, 1]
    assert {each["pool"]["resourceSliceCount"] for each in found} == {5}
