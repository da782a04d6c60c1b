"""The checkpoint of allocations and the known leases of an agent."""

import asyncio
import threading
from pathlib import Path
from typing import IO, Any

import pytest
from msgspec import structs

from services.node_agent.files import replace_file
from services.node_agent.records.checkpoint import Checkpoint
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from services.node_agent.records.known_leases import KnownLeases
from shared.dialects.dialect import ContainerSetup
from shared.model.bounds import MOST, MOST_WITH_GPUS
from shared.model.devices.device import Device
from shared.model.events.node_events import DeviceReported
from shared.model.leases.lease import ClaimAllocation, Lease, LeaseState
from shared.model.names import NodeName, PodUid
from shared.nats import wire
from tests.support.build import device
from tests.support.node_agent.agent import lease_of, share
from tests.support.node_agent.node import entry_of


def entry(uid: str = "u1", **changes: Any) -> CheckpointEntry:
    return entry_of(lease_of(uid, share(**changes)), ContainerSetup(environment={"A": "1"}))


async def test_a_checkpoint_reads_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.json"
    first = Checkpoint(path, "node-0")
    await first.save(entry("u1", fence=3))

    second = Checkpoint(path, "node-0")
    await second.load()

    assert second.by_key == first.by_key
    assert second.fences == first.fences
    assert not second.lost


PODS = 110
"""Of a node, by the kubelet's default."""
MAX_PAYLOAD = 1_048_576
"""Bytes of a message, by the default of NATS."""


def test_what_a_node_reports_of_pods_with_many_containers_fits_into_one_message() -> None:
    names = [f"container-{number:04}" for number in range(MOST_WITH_GPUS)]
    leases = [
        lease_of(f"{pod:036}", *(share(container=name, fence=MOST) for name in names))
        for pod in range(PODS)
    ]
    checkpoint = Checkpoint(Path("unused"), "node-0")
    before = structs.replace(leases[0], version=1)
    for lease in (before, *leases):
        for name in names[lease is before :]:
            made = entry_of(lease, container=name)
            checkpoint.by_key[made.key] = made
    report = DeviceReported(
        node=NodeName("node-0"), devices=(), served=(), allocations=checkpoint.reported
    )

    assert [each.lease for each in report.allocations] == leases
    assert len(wire.encode([report])) < MAX_PAYLOAD


async def test_devices_count_as_recorded_only_when_they_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint.json"
    before = list[tuple[Device, ...]]()
    written = Checkpoint(path, "node-0")

    def replaced(*content: Any) -> None:
        before.append(written.devices)
        replace_file(*content)

    monkeypatch.setattr("services.node_agent.records.checkpoint.replace_file", replaced)
    await written.record_devices([device()])
    restarted = Checkpoint(path, "node-0")
    await restarted.load()

    assert before == [()]
    assert written.devices == restarted.devices == (device(),)


async def test_an_interrupted_write_does_not_affect_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = threading.Event()
    began = threading.Event()
    path = tmp_path / "checkpoint.json"
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


@pytest.mark.parametrize("text", ['{"v": 1, "entr', '{"v": 1, "node": "node-1"}', None])
async def test_a_checkpoint_that_is_damaged_of_another_node_or_missing_is_lost(
    tmp_path: Path, text: str | None
) -> None:
    path = tmp_path / "checkpoint.json"
    if text is not None:
        path.write_text(text)
    record = Checkpoint(path, "node-0")

    await record.load()

    assert record.lost
    assert record.allocations == ()
    aside = [] if text is None else [path.with_suffix(".damaged")]
    assert list(tmp_path.iterdir()) == aside


async def test_fences_are_kept_after_their_pod_is_removed(tmp_path: Path) -> None:
    record = Checkpoint(tmp_path / "checkpoint.json", "node-0")
    await record.save(entry("u1", fence=5, slot=0))
    await record.save(entry("u2", fence=6, slot=None, slotted=False))

    await record.forget([PodUid("u1"), PodUid("u2")])

    assert record.allocations == ()
    assert [fence.fence for fence in record.fences.values()] == [5]
    assert list(record.device_fences.values()) == [5]


async def test_each_container_is_to_start_from_its_allocation_to_the_reply_to_its_start(
    tmp_path: Path,
) -> None:
    record = Checkpoint(tmp_path / "c.json", "node-0")
    one = entry("u1")
    two = entry("u2")
    for each in (one, two):
        record.note_call(each, 10.0, starts=False)

    assert (record.starts_due(12.9), record.starts_due(13.0)) == (True, False)
    record.note_call(one, 11.0, starts=True)
    assert record.starts_due(12.9)
    record.note_call(two, 11.0, starts=True)
    assert (record.starts_due(11.1), record.starts_due(11.3)) == (True, False)


def known(version: int, state: LeaseState = LeaseState.BOUND, **changes: Any) -> Lease:
    return structs.replace(lease_of("u1", version=version, state=state), **changes)


ENDED = LeaseState.RELEASED


@pytest.mark.parametrize(
    ("before", "update", "is_taken"),
    [
        pytest.param([known(3)], known(2, ENDED), False, id="older version"),
        pytest.param([known(3, ENDED)], known(2), False, id="older than the end"),
        pytest.param([known(9, resized_at=5.0)], known(7, resized_at=6.0), True, id="later resize"),
        pytest.param([known(9, resized_at=5.0)], known(7, resized_at=4.0), False, id="earlier one"),
        pytest.param(
            [known(9, ENDED, created_at=1.0)], known(1, created_at=2.0), True, id="new lease"
        ),
        pytest.param(
            [known(8, created_at=5.0), known(9, ENDED, created_at=5.0)],
            known(12, created_at=3.0),
            True,
            id="new lease of a placer whose clock is behind",
        ),
        pytest.param([], known(1, node=NodeName("node-1")), False, id="another node"),
    ],
)
def test_an_update_counts_if_it_is_newer(
    before: list[Lease], update: Lease, is_taken: bool
) -> None:
    leases = KnownLeases(NodeName("node-0"))
    leases.observe(before)
    kept = leases.find(PodUid("u1"))

    assert leases.observe([update]) == [update] * is_taken
    assert leases.find(PodUid("u1")) == (update if is_taken else kept)


@pytest.mark.parametrize("state", [LeaseState.RELEASED, LeaseState.BOUND])
def test_a_claims_lease_is_as_the_ledger_has_it_unless_an_update_came_meanwhile(
    state: LeaseState,
) -> None:
    leases = KnownLeases(NodeName("node-0"))
    restored = lease_of("u1", version=2)
    requested_at = leases.revision
    leases.observe([lease_of("u1", version=3, state=state)])

    leases.observe_reply([restored], since=requested_at)
    assert leases.find(PodUid("u1")) != restored
    leases.observe_reply([restored], since=leases.revision)

    assert leases.find(PodUid("u1")) == restored


def test_a_claim_that_was_ended_here_gets_its_lease_back_only_if_the_ledger_has_it() -> None:
    claim = structs.replace(lease_of("c1", version=3), claim=ClaimAllocation(generation="g1"))
    leases = KnownLeases(NodeName("node-0"))
    leases.observe([claim])

    leases.end([claim.pod])
    assert leases.observe([claim]) == []
    leases.observe_reply([claim], since=leases.revision)

    assert leases.find(claim.pod) == claim


@pytest.mark.parametrize(
    ("before", "reply", "is_taken"),
    [
        pytest.param([known(3, ENDED)], known(3), True, id="the ledger lost the end"),
        pytest.param([known(9)], known(3), True, id="the ledger lost a later state"),
        pytest.param([known(9, resized_at=5.0)], known(7), False, id="it lost a resize"),
    ],
)
def test_a_reply_counts_as_the_ledger_has_it(
    before: list[Lease], reply: Lease, is_taken: bool
) -> None:
    leases = KnownLeases(NodeName("node-0"))
    leases.observe(before)
    kept = leases.find(PodUid("u1"))

    leases.observe_reply([reply], since=leases.revision)

    assert leases.find(PodUid("u1")) == (reply if is_taken else kept)


def test_no_reply_gives_a_terminated_pod_a_lease_again() -> None:
    leases = KnownLeases(NodeName("node-0"))
    leases.observe([known(3)])
    leases.end([PodUid("u1")])

    leases.observe_reply([known(4)], since=leases.revision)
    leases.sync([known(4)], since=leases.revision)

    assert leases.find(PodUid("u1")) is None


def test_a_complete_list_removes_missing_leases_but_no_newer_ones() -> None:
    leases = KnownLeases(NodeName("node-0"))
    leases.observe([lease_of("u1"), lease_of("u2")])
    asked_at = leases.revision
    leases.observe([lease_of("u3")])

    leases.sync([lease_of("u2")], since=asked_at)

    assert set(leases.leases) == {"u2", "u3"}
