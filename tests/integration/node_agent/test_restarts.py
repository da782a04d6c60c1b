"""Restarts of the node agent and the kubelet, and lost or damaged files of the agent."""

import asyncio
import logging
import shutil
from pathlib import Path

import pytest
from msgspec import structs

from services.node_agent.agent_timing import AgentTiming
from services.node_agent.kubelet import registration
from services.node_agent.kubelet.device_plugin import encode_setup
from services.node_agent.service import NodeAgent
from shared.model.events.request_reply import TerminationRequest
from shared.model.names import NodeName, PodUid
from tests.support.node_agent.agent import (
    NUMBER,
    lease_of,
    one_node_cluster,
    share,
)
from tests.support.simcluster.kubelet import NODE, pod
from tests.support.waiting import until


def count_cleanups(agent: NodeAgent, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Return a list that gets an element at the end of each clean-up from now on."""
    ended: list[None] = []
    remove_ended = agent.reconciler.remove_ended

    async def counted() -> None:
        await remove_ended()
        ended.append(None)

    monkeypatch.setattr(agent.reconciler, "remove_ended", counted)
    return ended


async def test_40_the_agent_registers_with_a_restarted_kubelet_within_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for pause in ("LOOK_S", "MIN_PAUSE_S"):
        monkeypatch.setattr(registration, pause, 600.0)
    async with one_node_cluster() as cluster, cluster.running():
        await cluster.run_pod("one", share(0, 1000))
        await cluster.node.kubelet.restart()
        await cluster.node.allocatable(NUMBER, 20)
        await cluster.run_pod("two", share(0, 2000, slot=1, fence=2))

        assert cluster.node.pod("one")["status"]["phase"] == "Running"
        assert len(cluster.activated) == 2


@pytest.mark.parametrize("deleted", [False, True])
async def test_a_damaged_or_deleted_checkpoint_is_rebuilt_and_containers_may_restart(
    *, deleted: bool
) -> None:
    async with one_node_cluster() as cluster:
        async with cluster.running():
            await cluster.run_pod("one", share(0, 1000))
        ids = list((await cluster.node.allocated_devices())["one", "main"])
        if deleted:
            shutil.rmtree(cluster.root / "agent")
        else:
            (cluster.root / "agent" / "checkpoint.json").write_text("{")
        async with cluster.running() as agent:
            await until(lambda: agent.checkpoint.allocations)
            await agent.plugins.handler.pre_start_container(NUMBER, ids)

            assert agent.checkpoint.allocations[0].name == "one"
            assert await until(lambda: agent.checkpoint.devices) == agent.node.devices
            assert (cluster.root / "agent" / "checkpoint.damaged").exists() is not deleted


async def test_23_a_repeated_allocate_gets_the_same_response_after_a_restart() -> None:
    async with one_node_cluster() as cluster:
        async with cluster.running() as agent:
            await cluster.run_pod("one", share(0, 1000))
            ids = list((await cluster.node.allocated_devices())["one", "main"])
            (first,) = agent.checkpoint.entries
        assert cluster.node.kubelet._pods is not None
        cluster.node.kubelet._pods._devices.state.allocations.clear()  # the kubelet lost its record
        async with cluster.running() as agent:
            again = await agent.plugins.handler.allocate(NUMBER, ids)

    assert encode_setup(first.setup) == encode_setup(again)


async def test_a_deleted_pod_is_removed_from_the_checkpoint_once_its_lease_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        one_node_cluster(rate=100, timing=AgentTiming(new_files_s=3.0)) as cluster,
        cluster.running() as agent,
    ):
        lease = await cluster.run_pod("one", share(0, 1000))
        unknown_pod = PodUid("never-here")
        request = TerminationRequest(
            node=NodeName(NODE), pod=lease.pod, more_pods=(unknown_pod, lease.pod)
        )
        running = await agent.report_terminated(request)
        assert running.terminated_pods == (unknown_pod,)
        await cluster.delete_pod("one")
        cleanups = count_cleanups(agent, monkeypatch)
        await until(lambda: len(cleanups) >= 3)
        kept = len(agent.checkpoint.allocations)
        directory = cluster.root / "agent" / "containers" / f"{lease.pod}_main"
        there = directory.exists()
        await cluster.release(lease)
        await until(lambda: not agent.checkpoint.allocations and not directory.exists())
        gone = await cluster.terminated(lease.pod)

    assert (running.terminated, gone) == (False, True)
    assert kept == 1, "the lease had not ended yet"
    assert there


async def test_a_pod_that_was_reported_as_terminated_gets_nothing_if_it_is_admitted_after_it() -> (
    None
):
    """A kubelet admits one pod after the other, and may be slow."""
    async with one_node_cluster() as cluster, cluster.running() as agent:
        lease = cluster.ledger.grant(lease_of("deleted-pod", share(0, 1000)))
        await cluster.push_lease(lease)

        assert await cluster.terminated(lease.pod)
        await cluster.push_lease(structs.replace(lease, version=9))

        assert agent.leases.find(lease.pod) is None


async def test_a_pod_that_was_deleted_while_it_started_has_not_terminated_yet() -> None:
    timing = AgentTiming(starting_s=600.0)
    async with one_node_cluster(timing=timing) as cluster, cluster.running() as agent:
        lease = await cluster.run_pod("one", share(0, 1000))
        await cluster.delete_pod("one")
        assert not await cluster.terminated(lease.pod)

        agent.node.timing = AgentTiming(starting_s=0.0)
        await until(lambda: cluster.terminated(lease.pod))


async def test_a_container_that_outlives_pod_and_lease_counts_until_it_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its node was cut off when the pod was deleted by force: only its processes are left."""
    async with one_node_cluster(rate=40, proc_dir=tmp_path) as cluster, cluster.running() as agent:
        old = await cluster.run_pod("old", share(0, 10_000))
        process = tmp_path / "17"
        process.mkdir()
        (process / "cgroup").write_text(f"0::/kubepods/pod{old.pod}/{64 * 'a'}\n")
        await cluster.delete_pod("old")
        await cluster.release(old)
        cleanups = count_cleanups(agent, monkeypatch)
        await until(lambda: len(cleanups) >= 3)

        await cluster.fail_pod("new", share(0, 10_000, slot=1, fence=2))

        assert "default/old" in cluster.message("new")
        assert "default/new" in cluster.message("new")
        shutil.rmtree(process)
        await cluster.run_pod("next", share(0, 10_000, slot=2, fence=3))


async def test_a_second_agent_waits_until_the_first_has_stopped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def settled() -> None:
        async with cluster.running(registered=False):
            return

    caplog.set_level(logging.INFO)
    async with one_node_cluster() as cluster:
        async with cluster.running():
            second = asyncio.create_task(settled())
            await until(lambda: "waiting for another node agent" in caplog.text)
            early = second.done()
        async with asyncio.timeout(30):
            await second

    assert not early


async def test_a_kubelet_restart_during_allocate_fails_only_that_pod() -> None:
    async with one_node_cluster() as cluster, cluster.running() as agent:
        cluster.ledger.unavailable = True
        cluster.bind(pod("unlucky", limits={NUMBER: 1}), share(0, 1000), lease_known=False)
        await until(lambda: any(question.pods for question in cluster.ledger.requests))
        await cluster.node.kubelet.restart()
        cluster.ledger.unavailable = False
        await cluster.node.phase("unlucky", "Failed")
        await until(lambda: agent.plugins.unready_reason() is None)
        await cluster.node.allocatable(NUMBER, 20)
        await cluster.run_pod("two", share(0, 2000, slot=1, fence=2))

        assert cluster.env("two")["CUDA_DEVICE_MEMORY_LIMIT_0"] == "2000m"


async def test_no_pod_is_removed_from_the_checkpoint_before_the_leases_are_synced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with one_node_cluster(rate=100) as cluster:
        async with cluster.running():
            lease = await cluster.run_pod("one", share(0, 1000))
        await cluster.delete_pod("one")
        cluster.ledger.unavailable = True
        async with cluster.running() as agent:
            cleanups = count_cleanups(agent, monkeypatch)
            await until(lambda: len(cleanups) >= 3)
            kept = agent.checkpoint.pods
            del cluster.ledger.leases[lease.pod]
            cluster.ledger.unavailable = False
            await until(lambda: not agent.checkpoint.pods)

    assert kept == {lease.pod}
