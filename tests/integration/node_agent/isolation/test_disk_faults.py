"""A node whose disk is full, gone or not ours: no pod is lost to it, and everybody is told."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from services.node_agent.agent_timing import AgentTiming
from services.node_agent.allocate.admission_window import LEASES_NOT_SYNCED
from services.node_agent.instance_lock import instance_lock
from shared.model.errors import UnavailableError
from shared.model.events.request_reply import BindRequest
from shared.model.names import NodeName
from tests.support.binder.node_binder import Binder, reserve
from tests.support.node_agent.agent import NUMBER, lease_of, share, site
from tests.support.simcluster.kubelet import NODE, pod
from tests.support.waiting import until

OFTEN = AgentTiming(cleanup_s=0.1)


async def test_while_the_disk_is_full_pods_wait_and_none_is_refused() -> None:
    async with site(timing=OFTEN) as at, at.running() as agent:
        agent.files.min_free_bytes = 1 << 62
        await until(lambda: agent.files.unwritable_reason)
        binder = Binder(at)
        going = asyncio.create_task(binder.bind(reserve(at, 1, share(0, 1001))))
        await until(lambda: any("is full" in reason for reason in binder.waits))
        agent.files.min_free_bytes = 0
        await going
        await at.node.phase("p1", "Running")

    assert set(binder.waits) <= {f"the disk of {at.root}/agent is full", LEASES_NOT_SYNCED}
    assert not at.refused


async def test_a_disk_that_fills_between_two_looks_holds_the_next_pod_back() -> None:
    async with site(timing=AgentTiming(cleanup_s=1000.0)) as at, at.running() as agent:
        before = await agent.admit_binds(asked())
        agent.files.min_free_bytes = 1 << 62
        full = await agent.admit_binds(asked())
        agent.files.min_free_bytes = 0
        after = await agent.admit_binds(asked())

    assert before.deferred_pods == after.deferred_pods == ()
    assert full.deferred_pods
    assert "is full" in full.reason


def asked() -> BindRequest:
    return BindRequest(node=NodeName(NODE), leases=(lease_of("some-uid"),))


async def test_what_was_read_last_of_the_settings_need_not_be_kept_for_an_agent_to_start() -> None:
    async with site(timing=OFTEN) as at:
        (at.root / "agent").mkdir(exist_ok=True)
        (at.root / "agent" / "device-config.new").symlink_to("/dev/full")
        async with at.running():
            at.bind(pod("one", limits={NUMBER: 1}), share(0, 1000))
            await at.node.phase("one", "Running")


async def test_a_state_directory_that_vanishes_is_told_and_made_again() -> None:
    async with site(timing=OFTEN) as at, at.running() as agent:
        state = at.root / "agent"
        state.rename(at.root / "away")
        state.write_text("in the way")
        await until(lambda: "nothing can be written below" in agent.files.unwritable_reason)
        state.unlink()
        (at.root / "away").rename(state)
        await until(lambda: not agent.files.unwritable_reason)
        at.bind(pod("one", limits={NUMBER: 1}), share(0, 1000))
        await at.node.phase("one", "Running")


async def test_an_answer_that_cannot_be_written_down_is_not_given() -> None:
    async with site(timing=OFTEN) as at, at.running() as agent:
        (at.root / "agent" / "checkpoint.new").symlink_to("/dev/full")
        at.bind(pod("one", limits={NUMBER: 1}), share(0, 1000))
        await at.node.phase("one", "Failed")
        message, kept = at.message("one"), agent.checkpoint.allocations
        at.bind(pod("two", limits={NUMBER: 1}), share(0, 1000, fence=2))
        await at.node.phase("two", "Running")

    assert "No space left on device" in message
    assert kept == ()


async def test_a_region_for_which_there_is_no_room_starts_no_container(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    async with site(timing=OFTEN) as at, at.running():
        with monkeypatch.context() as short:
            short.setattr("services.node_agent.isolation.region_seed._write", full)
            at.bind(pod("one", limits={NUMBER: 1}), share(0, 1000))
            await at.node.phase("one", "Failed")
        at.bind(pod("two", limits={NUMBER: 1}), share(0, 1000, fence=2))
        await at.node.phase("two", "Running")

    assert "the limits of the container cannot be set" in at.message("one")
    assert "No space left on device" in at.message("one")


@pytest.mark.parametrize("there", ["a file", "nothing that can be made"])
async def test_an_agent_without_a_directory_of_its_own_says_so(tmp_path: Path, there: str) -> None:
    place = tmp_path / "state"
    place.write_text("")

    with pytest.raises(UnavailableError, match="--state-dir must be writable"):
        async with instance_lock(place if there == "a file" else place / "below"):
            pass
