"""The checkpoint of allocations and the known leases of an agent."""

import asyncio
import threading
from pathlib import Path
from typing import IO, Any

import pytest
from msgspec import structs

from services.node_agent.records.checkpoint import Checkpoint
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from services.node_agent.records.known_leases import KnownLeases
from shared.dialects.dialect import ContainerSetup
from shared.model.lease import ClaimAllocation, LeaseState
from shared.model.names import NodeName, PodUid
from tests.support.build import allocation_of
from tests.support.node_agent.agent import lease_of, share


def entry(uid: str = "u1", **changes: Any) -> CheckpointEntry:
    held = lease_of(uid, share(**changes))
    activation = allocation_of(held)
    return CheckpointEntry(allocation=activation, setup=ContainerSetup(environment={"A": "1"}))


async def test_a_checkpoint_reads_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.json"
    first = Checkpoint(path, "node-0")
    await first.save(entry("u1", fence=3))

    second = Checkpoint(path, "node-0")
    await second.load()

    assert second.by_key == first.by_key
    assert second.fences == first.fences
    assert not second.lost


async def test_an_interrupted_write_does_not_affect_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, began, path = threading.Event(), threading.Event(), tmp_path / "checkpoint.json"
    open_now = Path.open

    def opened(path: Path, mode: str = "r") -> IO[Any]:
        file = open_now(path, mode)
        if not began.is_set():
            began.set()
            slow.wait(30)
        return file

    monkeypatch.setattr(Path, "open", opened)
    first = Checkpoint(path, "node-0")
    async with asyncio.TaskGroup() as group:
        broken = group.create_task(first.save(entry("u1")))
        await asyncio.to_thread(began.wait, 30)
        broken.cancel()
        await asyncio.wait({broken})
        following = group.create_task(first.save(entry("u2")))
        await asyncio.wait({following}, timeout=0.2)
        slow.set()
    second = Checkpoint(path, "node-0")
    await second.load()

    assert not second.lost
    assert second.by_key == first.by_key
    assert second.pods == {"u2"}


async def test_a_damaged_checkpoint_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.json"
    path.write_text('{"v": 1, "entr')
    record = Checkpoint(path, "node-0")

    await record.load()

    assert record.lost
    assert (tmp_path / "checkpoint.damaged").exists()
    assert record.allocations == ()


async def test_a_missing_checkpoint_counts_as_possibly_lost(tmp_path: Path) -> None:
    record = Checkpoint(tmp_path / "agent" / "checkpoint.json", "node-0")

    await record.load()

    assert record.lost
    assert not list(tmp_path.iterdir())


async def test_a_checkpoint_of_another_node_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.json"
    await Checkpoint(path, "node-1").save(entry())
    record = Checkpoint(path, "node-0")

    await record.load()

    assert record.lost


async def test_fences_are_kept_after_their_pod_is_removed(tmp_path: Path) -> None:
    record = Checkpoint(tmp_path / "checkpoint.json", "node-0")
    await record.save(entry("u1", fence=5, slot=0))
    await record.save(entry("u2", fence=6, slot=None, slotted=False))

    await record.forget([PodUid("u1"), PodUid("u2")])

    assert record.allocations == ()
    assert [fence.fence for fence in record.fences.values()] == [5]
    assert list(record.device_fences.values()) == [5]


def test_an_older_version_of_a_lease_changes_nothing() -> None:
    leases = KnownLeases(NodeName("node-0"))
    leases.observe([lease_of("u1", version=3)])

    assert leases.observe([lease_of("u1", version=2, state=LeaseState.RELEASED)]) == []
    assert leases.find(PodUid("u1")) == lease_of("u1", version=3)


def test_a_stale_event_does_not_restore_a_released_lease() -> None:
    leases = KnownLeases(NodeName("node-0"))
    leases.observe([lease_of("u1", version=3, state=LeaseState.RELEASED)])
    leases.observe([lease_of("u1", version=2)])

    assert leases.find(PodUid("u1")) is None


@pytest.mark.parametrize("state", [LeaseState.RELEASED, LeaseState.BOUND])
def test_a_claims_lease_is_as_the_ledger_has_it_unless_an_update_came_meanwhile(
    state: LeaseState,
) -> None:
    leases, restored = KnownLeases(NodeName("node-0")), lease_of("u1", version=2)
    requested_at = leases.revision
    leases.observe([lease_of("u1", version=3, state=state)])

    leases.observe_claim([restored], since=requested_at)
    assert leases.find(PodUid("u1")) != restored
    leases.observe_claim([restored], since=leases.revision)

    assert leases.find(PodUid("u1")) == restored


def test_a_later_resize_counts_although_the_ledger_has_lost_versions() -> None:
    leases = KnownLeases(NodeName("node-0"))
    leases.observe([structs.replace(lease_of("u1", version=9), resized_at=5.0)])
    later = structs.replace(lease_of("u1", version=7), resized_at=6.0)
    earlier = structs.replace(lease_of("u1", version=7), resized_at=4.0)

    assert leases.observe([later]) == [later]
    assert leases.observe([earlier]) == []


def test_a_claim_that_was_ended_here_gets_its_lease_back_only_if_the_ledger_has_it() -> None:
    claim = structs.replace(lease_of("c1", version=3), claim=ClaimAllocation(generation="g1"))
    leases = KnownLeases(NodeName("node-0"))
    leases.observe([claim])

    leases.end([claim.pod])
    assert leases.observe([claim]) == []
    leases.observe_claim([claim], since=leases.revision)

    assert leases.find(claim.pod) == claim


def test_a_new_lease_of_the_same_pod_is_accepted_with_a_lower_version() -> None:
    leases = KnownLeases(NodeName("node-0"))
    leases.observe([lease_of("u1", version=9, state=LeaseState.RELEASED, created_at=1.0)])
    leases.observe([lease_of("u1", version=1, created_at=2.0)])

    assert leases.find(PodUid("u1")) is not None


def test_a_new_lease_of_the_same_pod_is_accepted_although_its_placers_clock_is_behind() -> None:
    leases = KnownLeases(NodeName("node-0"))
    leases.observe([lease_of("u1", version=8, created_at=5.0)])
    leases.observe([lease_of("u1", version=9, state=LeaseState.RELEASED, created_at=5.0)])

    leases.observe([lease_of("u1", version=12, created_at=3.0)])

    found = leases.find(PodUid("u1"))
    assert found is not None
    assert found.version == 12


def test_a_lease_of_another_node_is_ignored() -> None:
    leases = KnownLeases(NodeName("node-0"))

    assert leases.observe([lease_of("u1", node=NodeName("node-1"))]) == []


def test_a_complete_list_removes_missing_leases_but_no_newer_ones() -> None:
    leases = KnownLeases(NodeName("node-0"))
    leases.observe([lease_of("u1"), lease_of("u2")])
    asked_at = leases.revision
    leases.observe([lease_of("u3")])

    leases.sync([lease_of("u2")], since=asked_at)

    assert set(leases.leases) == {"u2", "u3"}
