"""An agent never records more of a device than the device has."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.node_agent.records.checkpoint import Checkpoint
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from services.node_agent.records.device_guard import (
    Excess,
    OvercommitError,
    beyond_leases,
    check_room,
    close_unrecorded,
    with_leftovers,
)
from shared.model.devices.device import Device, DeviceMode, Held
from shared.model.leases.lease import MigPlacement, Share
from shared.model.names import DeviceUuid, PodUid
from shared.model.requests.request import SharingPolicy
from tests.support.node_agent.agent import lease_of, share
from tests.support.node_agent.node import entry_of

GPU = DeviceUuid("GPU-1")
CONTAINER = ("main",)
DEVICES = {GPU: Device(uuid=GPU, index=0, model="A100", memory_mib=81920, slots=10)}


def entry_of_pod(pod: str, *shares: Share, **allocation: Any) -> CheckpointEntry:
    return entry_of(lease_of(pod, *shares, name=f"pod-{pod}"), **allocation)


def part(memory_mib: int = 1024, **changes: Any) -> Share:
    facts = {"device": GPU, "memory_mib": memory_mib, "cores_percent": 0, "slot": None}
    return share(**{**facts, **changes})


def check(entry: CheckpointEntry, *entries: CheckpointEntry) -> None:
    check_room(entry.lease, CONTAINER, entries, DEVICES, {})


def test_memory_beyond_the_device_is_refused_with_both_holders() -> None:
    first, second = entry_of_pod("a", part(51200)), entry_of_pod("b", part(51200))

    check(first)
    with pytest.raises(OvercommitError) as error:
        check(second, first)

    text = str(error.value)
    assert "102400" in text
    assert "81920" in text
    assert "default/pod-a has 51200 MiB" in text
    assert "default/pod-b would have 51200 MiB" in text


def test_a_gpu_has_time_slices_of_one_length() -> None:
    first, second = (
        entry_of(lease_of(uid, part(), name=f"pod-{uid}", intervals={"main": interval}))
        for uid, interval in (("a", "Short"), ("b", "Medium"))
    )

    with pytest.raises(OvercommitError, match="it would have Medium and Short time slices at once"):
        check(second, first)
    check(second, entry_of_pod("c", part()))
    check(first, first)


ALONE = part(sharing=SharingPolicy.EXCLUSIVE)


@pytest.mark.parametrize(
    ("own", "others", "refusal"),
    [
        (part(81920 - 51200), [part(51200)], ""),
        (part(81920 - 51200 + 1), [part(51200)], "81921 would be given out"),
        (part(cores_percent=60), [part(cores_percent=50)], "100 % of its cores, and 110 "),
        (part(slot=2), [part(slot=1)], ""),
        (part(slot=1), [part(slot=1)], "share 1 would have two pods"),
        (ALONE, [], ""),
        (part(), [ALONE], "exclusively"),
        (ALONE, [part()], "exclusively"),
        (part(1), [part(1)] * 10, "10 shares"),
        (part(1, slots=2), [part(1)] * 2, "2 shares"),
    ],
)
def test_memory_cores_and_slots_are_given_out_once(
    own: Share, others: list[Share], refusal: str
) -> None:
    entries = [entry_of_pod(f"p{number}", other) for number, other in enumerate(others)]
    with pytest.raises(OvercommitError, match=refusal) if refusal else nullcontext():
        check(entry_of_pod("b", own), *entries)


def test_containers_of_one_pod_count_as_the_ledger_counts_them() -> None:
    shares = (
        part(70000, container="init", init=True),
        part(40000, container="main"),
        part(41000, container="side"),
    )
    init, main, side = (
        entry_of_pod("a", *shares, container=name) for name in ("init", "main", "side")
    )

    check(main, init)
    check(side, init, main)
    with pytest.raises(OvercommitError):
        check(entry_of_pod("b", part(1000)), init, main, side)


def test_a_repeated_answer_counts_once() -> None:
    entry = entry_of_pod("a", part(51200))
    check(entry, entry)
    check(entry, replace(entry, allocation=replace(entry.allocation, resource="other")))


def instance(position: int, layout: str = "g1") -> Share:
    placed = MigPlacement(layout=layout, position=position, profile="1g.10gb")
    return part(9856, mig=placed, slot=position)


@pytest.mark.parametrize(
    ("own", "refusal"),
    [(instance(1), ""), (instance(0), "position 0"), (instance(1, "g2"), "layouts")],
)
def test_mig_instances_are_disjoint(own: Share, refusal: str) -> None:
    device = {GPU: replace(DEVICES[GPU], mode=DeviceMode.MIG)}

    with pytest.raises(OvercommitError, match=refusal) if refusal else nullcontext():
        check_room(
            entry_of_pod("b", own).lease, CONTAINER, [entry_of_pod("a", instance(0))], device, {}
        )


def test_nothing_more_is_given_out_of_a_device_with_unknown_holders() -> None:
    entry = entry_of_pod("b", part())
    with pytest.raises(OvercommitError, match="default/lost"):
        check_room(entry.lease, CONTAINER, (), DEVICES, {GPU: ("default/lost",)})
    check_room(entry.lease, CONTAINER, (), DEVICES, {GPU: (f"default/{entry.allocation.name}",)})


def test_nothing_more_is_given_out_of_a_device_that_is_missing() -> None:
    with pytest.raises(OvercommitError, match=f"device {GPU} is missing"):
        check_room(entry_of_pod("a", part()).lease, CONTAINER, (), {}, {})


async def test_a_checkpoint_records_no_allocation_that_over_commits(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "checkpoint.json", "node-0")
    await checkpoint.save(entry_of_pod("a", part(51200, fence=5)), devices=DEVICES)

    with pytest.raises(OvercommitError):
        await checkpoint.save(entry_of_pod("b", part(51200, fence=6)), devices=DEVICES)

    assert {key[0] for key in checkpoint.by_key} == {"a"}
    assert [fence.pod for fence in checkpoint.fences.values()] == ["a"]


def test_a_device_with_unrecorded_pods_is_reported_as_unhealthy_unless_it_is_already() -> None:
    free = replace(DEVICES[GPU], uuid=DeviceUuid("GPU-2"), index=1)
    faulty = replace(free, uuid=DeviceUuid("GPU-3"), healthy=False, fault="XID 79")
    pods = ("default/pod-a",)

    closed, *others = close_unrecorded((DEVICES[GPU], free, faulty), {GPU: pods, faulty.uuid: pods})

    assert not closed.healthy
    assert pods[0] in closed.fault
    assert others == [free, faulty]


def test_what_is_given_out_beyond_leases_is_reported_with_its_device() -> None:
    first = entry_of_pod("a", part(1024, slot=1, cores_percent=10))
    second = entry_of_pod("b", part(2048, slot=3, cores_percent=20))
    entries = (first, second)
    leased = {first.lease.pod: first.lease}

    assert beyond_leases(entries, {**leased, second.lease.pod: second.lease}) == {}
    beyond = beyond_leases(entries, leased)
    [device] = described(entries, beyond, since={"b": 5.0}, pids={"b": (7,)})

    assert device.held == Held(memory_mib=2048, cores_percent=20, shares=1, slots="0001")
    assert [each.text("GPU 0") for each in device.leftovers] == [
        "processes 7 of pod default/pod-b, which has no lease any more, still hold 2048 MiB of "
        "GPU 0 since 1970-01-01T00:00:05Z"
    ]


def test_a_lease_of_another_slot_or_of_less_covers_only_what_it_has() -> None:
    given = entry_of_pod("a", part(4096, slot=1))
    pod = PodUid("a")
    less = lease_of("a", part(1024, slot=1))
    elsewhere = lease_of("a", part(4096, slot=2))

    [device] = described((given,), beyond_leases((given,), {pod: less}), since={"a": 5.0})
    assert device.held == Held(memory_mib=3072)
    [device] = described((given,), beyond_leases((given,), {pod: elsewhere}), since={"a": 5.0})
    assert device.held == Held(slots="01")


def test_a_device_that_an_ended_pod_had_exclusively_is_held_as_a_whole() -> None:
    entry = entry_of_pod("a", ALONE)

    [device] = described((entry,), beyond_leases((entry,), {}), since={"a": 5.0})

    assert device.held == Held(memory_mib=81_920, cores_percent=100, shares=1)


def test_a_deleted_pod_with_its_lease_is_named_and_holds_nothing_more() -> None:
    entry = entry_of_pod("a", part(4096))

    [device] = described((entry,), {}, vanished={"a": 5.0})

    assert device.held is None
    assert "pod default/pod-a, which was deleted, still hold" in device.leftovers[0].text("it")


def described(
    entries: tuple[CheckpointEntry, ...], beyond: Mapping[PodUid, Excess], **more: Any
) -> tuple[Device, ...]:
    known: dict[str, Any] = {"since": {}, "vanished": {}, "pids": {}}
    return with_leftovers(DEVICES.values(), entries, beyond, **(known | more))
