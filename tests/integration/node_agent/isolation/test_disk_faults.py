"""A full, missing or unwritable state directory: pods wait or fail with the reason."""

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
from tests.support.node_agent.agent import lease_of, one_node_cluster, share
from tests.support.simcluster.kubelet import NODE
from tests.support.waiting import until

FAST = 50
"""Rate of the agent's clock."""


async def test_pods_wait_while_the_disk_is_full_and_none_is_refused() -> None:
    async with one_node_cluster(rate=FAST) as cluster, cluster.running() as agent:
        agent.node.files.min_free_bytes = 1 << 62
        await until(lambda: agent.node.files.unwritable_reason)
        binder = Binder(cluster)
        binding = asyncio.create_task(binder.bind(reserve(cluster, 1, share(0, 1001))))
        await until(lambda: any("is full" in reason for reason in binder.waits))
        agent.node.files.min_free_bytes = 0
        await binding
        await cluster.node.phase("p1", "Running")

    assert set(binder.waits) <= {f"the disk of {cluster.root}/agent is full", LEASES_NOT_SYNCED}
    assert not cluster.refused


async def test_a_disk_that_fills_between_two_checks_defers_the_next_bind() -> None:
    async with one_node_cluster(rate=0.02) as cluster, cluster.running() as agent:
        before = await agent.admit_binds(bind_request())
        agent.node.files.min_free_bytes = 1 << 62
        full = await agent.admit_binds(bind_request())
        agent.node.files.min_free_bytes = 0
        after = await agent.admit_binds(bind_request())

    assert before.deferred_pods == after.deferred_pods == ()
    assert full.deferred_pods
    assert "is full" in full.reason


def bind_request() -> BindRequest:
    return BindRequest(node=NodeName(NODE), leases=(lease_of("some-uid"),))


async def test_the_agent_starts_although_the_device_config_cannot_be_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with one_node_cluster(rate=FAST) as cluster:
        monkeypatch.setattr("services.node_agent.device_config.replace_file", full)
        async with cluster.running():
            await cluster.run_pod("one", share(0, 1000))


async def test_a_missing_state_directory_is_reported_until_it_is_restored() -> None:
    async with one_node_cluster(rate=FAST) as cluster, cluster.running() as agent:
        state = cluster.root / "agent"
        state.rename(cluster.root / "away")
        state.write_text("in the way")
        await until(lambda: "nothing can be written below" in agent.node.files.unwritable_reason)
        state.unlink()
        (cluster.root / "away").rename(state)
        await until(lambda: not agent.node.files.unwritable_reason)
        await cluster.run_pod("one", share(0, 1000))


@pytest.mark.parametrize(
    ("writes", "reason"),
    [
        ("records.checkpoint.replace_file", "must be on disk before the kubelet gets it"),
        ("isolation.region_writer._write", "the limits of the container cannot be set"),
    ],
)
async def test_allocate_fails_if_the_checkpoint_or_the_region_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, writes: str, reason: str
) -> None:
    async with one_node_cluster(rate=FAST) as cluster, cluster.running() as agent:
        with monkeypatch.context() as short:
            short.setattr(f"services.node_agent.{writes}", full)
            await cluster.fail_pod("one", share(0, 1000))
            message = cluster.message("one")
            kept = agent.checkpoint.allocations
        await cluster.run_pod("two", share(0, 1000, fence=2))

    assert reason in message
    assert "No space left on device" in message
    assert kept == ()


async def test_a_container_that_cannot_be_prepared_closes_the_node_until_it_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with one_node_cluster() as cluster, cluster.running() as agent:
        with monkeypatch.context() as short:
            short.setattr("services.node_agent.isolation.region_writer._write", full)
            await cluster.fail_pod("one", share(0, 1000))
            closed = await agent.admit_binds(bind_request())
            await agent.node.files.probe_disk()
            still_closed = await agent.admit_binds(bind_request())
        await agent.node.files.probe_disk()
        opened = await agent.admit_binds(bind_request())

    assert (closed.node_closed, still_closed.node_closed, opened.node_closed) == (True, True, False)
    assert "the limits of the container cannot be set" in closed.reason
    assert closed.reason == still_closed.reason
    assert opened.deferred_pods == ()


async def test_a_specification_that_cannot_be_written_closes_the_node_until_it_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with one_node_cluster(device_list_strategy=("cdi-cri",)) as cluster:
        cluster.changes["cdi_dir"] = cluster.node.kubelet.files.cdi
        cluster.timing = AgentTiming(sight_s=1.0)  # if a probe of the GPUs sees it first
        async with cluster.running() as agent:
            with monkeypatch.context() as short:
                short.setattr("services.node_agent.allocate.cdi_files.replace_file", full)
                agent.node.cdi.path.unlink()
                await cluster.fail_pod("one", share(0, 1000))
                closed = await agent.admit_binds(bind_request())
                with pytest.raises(UnavailableError):
                    await agent.watcher.probe()
                still_closed = await agent.admit_binds(bind_request())
            await agent.watcher.probe()
            opened = await agent.admit_binds(bind_request())

    assert (closed.node_closed, still_closed.node_closed, opened.node_closed) == (True, True, False)
    assert "--cdi-dir must be a directory of the host" in closed.reason
    assert opened.deferred_pods == ()


def full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("existing", ["a file", "nothing that can be made"])
async def test_an_unwritable_state_directory_is_refused_with_its_flag(
    tmp_path: Path, existing: str
) -> None:
    directory = tmp_path / "state"
    directory.write_text("")

    with pytest.raises(UnavailableError, match="--state-dir must be writable"):
        async with instance_lock(directory if existing == "a file" else directory / "below"):
            pass
