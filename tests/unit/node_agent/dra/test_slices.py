"""What a ResourceSlice offers of devices, beside what leases hold."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from msgspec import structs

from services.node_agent.dra.slices import (
    ClaimableNode,
    build_slices,
    find_dropped_fields,
    is_current,
    mib_quantity,
    nvlink_groups,
)
from shared.model.devices.device import Device, DeviceMode, Isolation, MigLayout, MigProfile
from shared.model.devices.enforcers import Offer
from shared.model.leases.lease import ClaimAllocation, Lease, MigPlacement
from shared.model.names import DeviceUuid, NodeName, PodUid
from shared.model.requests.claim import TaintEffect, device_name
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


def test_a_device_shows_the_time_slices_for_which_its_leases_ask() -> None:
    of_claim = structs.replace(lease(claim=True), intervals={"main": "Short"})

    [[asked], [plain]] = offered(GPU, of_claim), offered(GPU, lease(claim=True))

    assert asked["attributes"]["timeSlices"] == {"string": "Short"}
    assert "timeSlices" not in plain["attributes"]


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
NAMES = ["gpu-a-1g-5gb", "gpu-a-3g-20gb"]


def slices(*leases: Lease, devices: tuple[Device, ...] = (A100,)) -> list[dict[str, Any]]:
    node = replace(NODE, devices=devices, leases=leases)
    return [built["spec"] for built in build_slices(node, generation=1)]


def counts(*leases: Lease) -> dict[str, int]:
    """Return how many instances of each profile are allocated or free."""
    sizes = {"gpu-a-1g-5gb": 5, "gpu-a-3g-20gb": 20}
    [spec] = slices(*leases)
    return {
        device["name"]: int(device["capacity"]["memory"]["value"].removesuffix("Gi"))
        // sizes[device["name"]]
        for device in spec["devices"]
    }


def instance(layout: str, position: int, profile: str = "1g.5gb", *, claim: bool = False) -> Lease:
    place = MigPlacement(layout=layout, position=position, profile=profile)
    taken = lease(claim=claim, mig=place)
    return msgspec.structs.replace(taken, pod=PodUid(f"{layout}-{position}"))


def test_a_profile_is_a_device_whose_capacity_admits_exactly_its_size() -> None:
    [only] = slices()

    assert [device["name"] for device in only["devices"]] == NAMES
    small, large = only["devices"]
    assert small["capacity"] == {
        "memory": {
            "value": "10Gi",
            "requestPolicy": {"default": "5Gi", "validValues": ["5Gi"]},
        }
    }
    assert large["attributes"]["profile"] == {"string": "3g.20gb"}
    assert large["attributes"]["memoryMiB"] == {"int": 20_480}
    assert large["attributes"]["type"] == {"string": "mig"}
    assert large["bindingConditions"] == ["leasehold.dev/Leased"]
    assert large["allowMultipleAllocations"] is True
    assert "sharedCounters" not in only
    assert "consumesCounters" not in small


def test_a_lease_leaves_the_other_instances_of_its_layout() -> None:
    assert counts() == {"gpu-a-1g-5gb": 2, "gpu-a-3g-20gb": 1}
    assert counts(instance("group2", 1)) == {"gpu-a-3g-20gb": 1}
    assert counts(instance("group1", 0)) == {"gpu-a-1g-5gb": 1}
    assert counts(instance("group1", 0), instance("group1", 1)) == {}


def test_instances_of_claims_stay_in_the_capacity_as_the_scheduler_subtracts_them() -> None:
    both = (instance("group1", 0, claim=True), instance("group1", 1))

    assert counts(both[0]) == {"gpu-a-1g-5gb": 2}
    assert counts(*both) == {"gpu-a-1g-5gb": 1}
    large = instance("group2", 0, "3g.20gb", claim=True)
    assert counts(large) == {"gpu-a-1g-5gb": 1, "gpu-a-3g-20gb": 1}


def test_an_instance_that_its_claim_has_no_more_is_subtracted() -> None:
    held = instance("group1", 0, claim=True)
    node = replace(NODE, devices=(A100,), leases=(held,))

    [built] = build_slices(node, generation=1, deallocated=[(held.pod, "g")])

    [small] = built["spec"]["devices"]
    assert small["capacity"]["memory"]["value"] == "5Gi"


def test_a_slice_has_at_most_64_devices() -> None:
    gpus = tuple(replace(A100, uuid=DeviceUuid(f"GPU-{n}"), index=n) for n in range(33))

    built = slices(devices=gpus)

    assert [len(spec["devices"]) for spec in built] == [64, 2]
    assert {spec["pool"]["resourceSliceCount"] for spec in built} == {2}


@pytest.mark.parametrize(
    ("profile", "name"),
    [
        ("1g.5gb", "gpu-a-1g-5gb"),
        ("1g.5gb+me", "gpu-a-1g-5gb-plus-me"),
        ("1g.5gb-me", "gpu-a-1g-5gb-me"),
    ],
)
def test_the_name_of_each_profile_is_another_dns_label(profile: str, name: str) -> None:
    assert device_name(GPU.uuid, profile) == name


MODES = replace(
    GPU, offer=Offer(memory=("mps", "driver", "hami-core"), compute=("mps", "time", "hami-core"))
)


def modes(device: Device, *leases: Lease, has_groups: bool = True) -> list[str]:
    """Return the types of the devices that claims can be allocated of a GPU."""
    node = replace(NODE, devices=(device,), leases=leases, has_groups=has_groups)
    built = build_slices(node, generation=1)
    listed = [part for slice_ in built for part in slice_["spec"].get("devices", ())]
    assert all(
        part["name"] == device_name(GPU.uuid, "" if kind == "gpu" else kind)
        for part in listed
        if (kind := part["attributes"]["type"]["string"])
    )
    return [part["attributes"]["type"]["string"] for part in listed]


def test_each_mode_of_an_idle_gpu_is_a_device_in_a_group_of_its_own() -> None:
    node = replace(NODE, devices=(MODES, GPU), has_groups=True)

    [listed, counters] = [built["spec"] for built in build_slices(node, generation=1)]

    assert listed["pool"]["resourceSliceCount"] == counters["pool"]["resourceSliceCount"] == 2
    assert counters["sharedCounters"] == [{"name": "gpu-a", "counters": {"modes": {"value": "3"}}}]
    *of_modes, plain = listed["devices"]
    consumed = [device["consumesCounters"] for device in of_modes]
    assert [[counted["counterSet"] for counted in own] for own in consumed] == [["gpu-a"]] * 3
    groups = [counted["compatibilityGroups"] for [counted] in consumed]
    assert groups == [["shared"], ["mps"], ["time"]]
    assert {device["capacity"]["memory"]["value"] for device in of_modes} == {"15Gi"}
    assert "consumesCounters" not in plain


def test_no_mode_is_listed_that_kube_scheduler_could_not_tell_from_another() -> None:
    assert modes(MODES, has_groups=False) == ["gpu"]


@pytest.mark.parametrize("claim", [False, True])
@pytest.mark.parametrize(
    ("mode", "left"),
    [("mps", ["mps"]), ("time", ["time"]), ("driver", ["gpu"]), ("hami-core", ["gpu"])],
)
def test_a_gpu_is_listed_in_the_mode_of_its_leases_only(
    mode: Any, left: list[str], *, claim: bool
) -> None:
    held = lease(claim=claim, mode=mode, memory_mib=1000)

    assert modes(MODES, held) == left
    assert modes(MODES, held, has_groups=False) == [kind for kind in left if kind == "gpu"]


def test_a_gpu_that_a_claim_has_whole_is_listed_without_its_modes() -> None:
    whole = lease(claim=True, mode="exclusive", sharing=SharingPolicy.EXCLUSIVE, whole=True)

    assert modes(MODES, whole) == ["gpu"]


def test_a_gpu_that_is_given_out_only_whole_is_listed_without_its_modes() -> None:
    assert modes(replace(MODES, isolation=Isolation.STRICT)) == ["gpu"]


def test_a_slice_has_at_most_eight_counter_sets() -> None:
    gpus = tuple(replace(MODES, uuid=DeviceUuid(f"GPU-{number}")) for number in range(9))
    node = replace(NODE, devices=gpus, has_groups=True)

    built = {
        slice_["metadata"]["name"]: slice_["spec"] for slice_ in build_slices(node, generation=1)
    }

    sizes = {
        name: len(spec.get("sharedCounters") or spec["devices"]) for name, spec in built.items()
    }
    assert sizes == {
        "node-gpu.leasehold.dev": 27,
        "node-gpu.leasehold.dev-modes": 8,
        "node-gpu.leasehold.dev-modes-1": 1,
    }


def test_groups_and_counters_that_an_api_server_drops_are_noticed() -> None:
    node = replace(NODE, devices=(MODES,), has_groups=True)
    [listed, counters] = [built["spec"] for built in build_slices(node, generation=1)]
    device = {**listed["devices"][0], "consumesCounters": [{"counterSet": "gpu-a"}]}

    assert find_dropped_fields(listed, listed) == find_dropped_fields(counters, counters) == set()
    assert find_dropped_fields({"devices": [device]}, {"devices": [device]}) == {
        "compatibilityGroups"
    }
    assert find_dropped_fields(counters, {**counters, "sharedCounters": None}) == {"sharedCounters"}
    assert not is_current(counters, {**counters, "sharedCounters": None})
