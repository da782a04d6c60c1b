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
from shared.model.claim import TaintEffect
from shared.model.device import Device, DeviceMode, Isolation
from shared.model.lease import ClaimAllocation, Lease
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.request import SharingPolicy
from tests.support.node_agent.agent import share

GPU = Device(
    uuid=DeviceUuid("GPU-A"),
    index=0,
    model="Tesla T4",
    memory_mib=15_360,
    slots=10,
    pcie="pci0000:3a",
)


def lease(*, claim: bool = False, generation: str = "g", **changes: Any) -> Lease:
    return Lease(
        pod=PodUid("holder"),
        namespace=Namespace("default"),
        name="holder",
        node=NodeName("node"),
        shares=(share(device=GPU.uuid, **changes),),
        claim=ClaimAllocation(generation=generation) if claim else None,
    )


def offered(
    device: Device = GPU,
    *leases: Lease,
    deallocated: Sequence[tuple[PodUid, str]] = (),
    driver_version: str = "535.104.05",
    taint_effect: TaintEffect = TaintEffect.NO_SCHEDULE,
) -> list[dict[str, Any]]:
    node = ClaimableNode(
        name=NodeName("node"),
        uid="uid",
        devices=(device,),
        leases=leases,
        driver_version=driver_version,
        taint_effect=taint_effect,
    )
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
    assert policy["default"] == "15Gi"
    assert device["attributes"]["driverVersion"] == {"version": "535.104.5"}
    assert device["attributes"]["resource.kubernetes.io/pcieRoot"] == {"string": "pci0000:3a"}


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


@pytest.mark.parametrize(
    "changes",
    [{"memory_mib": 15_359}, {"cores_percent": 100}, {"sharing": SharingPolicy.EXCLUSIVE}],
)
def test_a_device_of_which_nothing_can_be_leased_is_left_out(changes: dict[str, Any]) -> None:
    assert offered(GPU, lease(**changes)) == []


def test_a_device_is_left_out_when_claims_have_all_its_cores() -> None:
    assert offered(GPU, lease(claim=True, cores_percent=100)) == []


def test_a_device_of_strict_isolation_is_offered_whole_or_not_at_all() -> None:
    strict = replace(GPU, isolation=Isolation.STRICT)

    [device] = offered(strict)

    assert "allowMultipleAllocations" not in device
    assert "requestPolicy" not in device["capacity"]["memory"]
    assert offered(strict, lease(memory_mib=1)) == []


def test_a_device_in_mig_mode_is_no_shared_device() -> None:
    assert offered(replace(GPU, mode=DeviceMode.MIG)) == []


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
