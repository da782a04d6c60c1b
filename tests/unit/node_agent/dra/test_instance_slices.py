"""Which MIG instances are offered to claims, and which memory slices they take."""

from dataclasses import replace
from typing import Any

from services.node_agent.dra.slices import ClaimableNode, build_slices
from services.node_agent.mig.instances import InstanceProfile
from shared.model.device import Device, DeviceMode, MigLayout, MigProfile
from shared.model.lease import ClaimAllocation, Lease, MigPlacement
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from tests.support.node_agent.agent import share

SMALL, LARGE = (
    MigProfile(name="1g.5gb", memory_mib=5120, count=2),
    MigProfile(name="3g.20gb", memory_mib=20_480, count=1),
)
GPU = Device(
    uuid=DeviceUuid("GPU-A"),
    index=0,
    model="NVIDIA A100-SXM4-40GB",
    memory_mib=40_960,
    slots=10,
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


def slices(*leases: Lease, devices: tuple[Device, ...] = (GPU,)) -> list[dict[str, Any]]:
    profiles = {device.uuid: PROFILES for device in devices}
    node = ClaimableNode(
        name=NodeName("node"), uid="uid", devices=devices, leases=leases, profiles=profiles
    )
    return [each["spec"] for each in build_slices(node, generation=1)]


def names(*leases: Lease) -> list[str]:
    return [device["name"] for device in slices(*leases)[0]["devices"]]


def lease(layout: str, position: int, *, claim: bool = False) -> Lease:
    place = MigPlacement(layout=layout, position=position, profile="1g.5gb")
    return Lease(
        pod=PodUid("holder"),
        namespace=Namespace("default"),
        name="holder",
        node=NodeName("node"),
        shares=(share(device=GPU.uuid, mig=place),),
        claim=ClaimAllocation(generation="g") if claim else None,
    )


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
    assert names(lease("group2", 1)) == ["gpu-a-group2-0"]
    assert names(lease("group1", 0, claim=True)) == ["gpu-a-group1-0", "gpu-a-group1-1"]


def test_layouts_without_known_starts_have_no_counters() -> None:
    present = replace(GPU, layouts=(MigLayout(name="present", profiles=(SMALL,)),))
    node = ClaimableNode(name=NodeName("node"), uid="uid", devices=(present,), leases=())

    [only] = build_slices(node, generation=1)

    assert [device["name"] for device in only["spec"]["devices"]] == [
        "gpu-a-present-0",
        "gpu-a-present-1",
    ]
    assert "consumesCounters" not in only["spec"]["devices"][0]


def test_a_slice_has_at_most_64_devices_and_8_sets_of_counters() -> None:
    gpus = tuple(replace(GPU, uuid=DeviceUuid(f"GPU-{n}"), index=n) for n in range(17))

    found = slices(devices=gpus)

    assert [len(each.get("devices", ())) for each in found] == [64, 4, 0, 0, 0]
    assert [len(each.get("sharedCounters", ())) for each in found] == [0, 0, 8, 8, 1]
    assert {each["pool"]["resourceSliceCount"] for each in found} == {5}
