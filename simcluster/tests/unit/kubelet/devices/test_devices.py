"""The device manager: choice of devices, allocations, checkpoint, resource names, rate limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simcluster.kubelet.devices.checkpoint import decode_checkpoint, encode_checkpoint
from simcluster.kubelet.devices.kubelet_devices import (
    AllocationError,
    KubeletDevices,
    PluginAllocation,
    align_devices,
    choose_devices,
    pick_devices,
)
from simcluster.kubelet.devices.pod_resources import BURST, CallRateLimit
from simcluster.kubelet.devices.registration import is_extended_resource

SLOT = "example.com/slot"


@pytest.mark.parametrize(
    "name", ["example.com/slot", "volcano.sh/vgpu-number", "tencent.com/vcuda-core"]
)
def test_a_domain_and_a_name_make_an_extended_resource(name: str) -> None:
    assert is_extended_resource(name)


@pytest.mark.parametrize(
    "name", ["cpu", "kubernetes.io/x", "a.kubernetes.io/x", "UPPER.com/x", "a/"]
)
def test_other_names_are_no_extended_resources(name: str) -> None:
    assert not is_extended_resource(name)


def allocation(pod_uid: str, *devices: str) -> PluginAllocation:
    return PluginAllocation(pod_uid, "main", SLOT, frozenset(devices), b"answer")


def kubelet_devices(*allocations: PluginAllocation, healthy: str = "abcd") -> KubeletDevices:
    state = KubeletDevices()
    state.update(SLOT, dict.fromkeys(healthy, "Healthy"))
    for allocation in allocations:
        state.record(allocation)
    return state


def test_devices_in_use_are_not_available() -> None:
    with pytest.raises(AllocationError, match="Requested: 3, Available: 2"):
        choose_devices(kubelet_devices(allocation("p", "a", "b")), SLOT, 3, ())


def test_reused_devices_come_first() -> None:
    choice = choose_devices(kubelet_devices(allocation("p", "a", "b")), SLOT, 2, ["a", "b"])

    assert (choice.needed, pick_devices(choice, [])) == (0, frozenset("ab"))


@given(st.sets(st.sampled_from("abcd")), st.lists(st.sampled_from("abcdxyz")), st.integers(0, 4))
def test_a_container_gets_free_devices_in_the_requested_number(
    used: set[str], preferred: list[str], required: int
) -> None:
    state = kubelet_devices(allocation("p", *used))
    if len(used) + required > 4:
        with pytest.raises(AllocationError):
            choose_devices(state, SLOT, required, ())
        return

    devices = pick_devices(choose_devices(state, SLOT, required, ()), preferred)

    assert len(devices) == required
    assert not devices & used


@pytest.mark.parametrize(
    ("numa", "required", "available"),
    [
        ({"a": {1}, "b": {0}, "c": {0, 1}, "d": {1}}, 2, "bc"),
        ({"a": {1}, "b": {0}, "c": {0, 1}, "d": {1}}, 3, "acd"),
        ({"c": {1}}, 1, "c"),
        ({}, 4, "abcd"),
    ],
)
def test_devices_are_aligned_to_the_lowest_numa_node_with_enough(
    numa: dict[str, set[int]], required: int, available: str
) -> None:
    choice = choose_devices(kubelet_devices(), SLOT, required, ())
    nodes = {device: frozenset(numa.get(device, ())) for device in "abcd"}

    assert align_devices(choice, nodes).available == set(available)


def test_a_container_is_rejected_where_no_numa_node_has_enough_devices() -> None:
    choice = choose_devices(kubelet_devices(), SLOT, 2, ())

    with pytest.raises(AllocationError, match="Topology locality"):
        align_devices(choice, {device: frozenset({n}) for n, device in enumerate("abcd")})


def test_the_capacity_of_a_lost_plugin_stays_listed() -> None:
    state = kubelet_devices()
    state.mark_unhealthy(SLOT)

    assert (state.capacity(), state.allocatable()) == ({SLOT: 4}, {SLOT: 0})


def test_a_checkpoint_has_allocations_and_resources_without_devices() -> None:
    restored = decode_checkpoint(encode_checkpoint(kubelet_devices(allocation("p", "a", "b"))))

    assert restored.allocations == kubelet_devices(allocation("p", "a", "b")).allocations
    assert restored.capacity() == {SLOT: 0}


def test_a_checkpoint_that_was_changed_is_refused() -> None:
    content = encode_checkpoint(kubelet_devices(allocation("p", "a"))).replace(
        b'"PodUID":"p"', b'"PodUID":"q"'
    )

    with pytest.raises(ValueError, match="checksum"):
        decode_checkpoint(content)


def test_pod_resources_allows_a_burst_and_then_100_calls_per_second() -> None:
    now = [0.0]
    limit = CallRateLimit(lambda: now[0])

    assert [limit.allows() for _ in range(int(BURST) + 1)] == [True] * int(BURST) + [False]
    now[0] = 0.011
    assert limit.allows()
