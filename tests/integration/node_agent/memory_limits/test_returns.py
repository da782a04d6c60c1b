"""Limits that the driver has lost, as after a reboot: back soon, or the lease says so."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.node_agent.device_watcher import PROBE_S
from services.node_agent.enforcers import limit_audit
from services.node_agent.gpus.nvml.memory_limits import NvmlMemoryLimits
from services.node_agent.memory_limits.cgroup_tree import CgroupTree
from services.node_agent.memory_limits.limit_setter import LimitSetter
from services.node_agent.partition.partition_server import PartitionServer
from services.node_agent.service import NodeAgent
from simcluster.gpu_driver.control import VARIABLE, control
from simcluster.node_agent.gpus import VANISH
from tests.support.node_agent.agent import OneNodeCluster, share
from tests.support.node_agent.judged_node import driver_limits
from tests.support.node_agent.mixed_node import cluster_with_driver, limited_cluster
from tests.support.waiting import until

HELD: dict[str, Any] = {"memory": "driver", "compute": "none", "mode": "driver"}
SOON_S = 10.0


@asynccontextmanager
async def partitioner(cluster: OneNodeCluster) -> AsyncIterator[None]:
    files = cluster.node.kubelet.files
    setter = LimitSetter(
        NvmlMemoryLimits(),
        CgroupTree(files.cgroups),
        fences=cluster.root / "fences.json",
        proc=files.proc,
    )
    gpus: Any = None
    server = PartitionServer(gpus, agent_uid=os.geteuid(), limits=setter)
    async with server.serve(cluster.settings.partition_socket or Path()):
        yield


def said_of_shares(agent: NodeAgent) -> str:
    return "; ".join(share.held_difference for share in agent.usage.report({}).shares)


def test_what_is_read_again_soon_is_read_within_ten_seconds() -> None:
    assert PROBE_S < SOON_S
    assert limit_audit.AGAIN_S < SOON_S


async def test_after_a_reboot_limits_are_back_once_the_partitioner_is_and_the_lease_says_so_before(
    driver_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert driver_folder.is_dir()
    monkeypatch.setenv(VARIABLE, "")  # the agent sets it
    async with cluster_with_driver("1xT4", tmp_path / "hook") as cluster:
        state = cluster.node.kubelet.files.gpu_state
        cluster.changes["partition_socket"] = cluster.root / "p.sock"
        async with cluster.running():
            control(state, "accounting", "dmem")
        async with partitioner(cluster), cluster.running() as agent:
            await until(lambda: "driver" in agent.node.devices[0].offer.memory)
            await cluster.run_pod("one", share(0, 2_000, **HELD))
        before = driver_limits(state)
        assert len(before) == 2
        control(state, "forget-limits")

        monkeypatch.setattr(limit_audit, "AUDIT_S", 3600.0)
        async with cluster.running() as agent:
            said = await until(lambda: said_of_shares(agent))
            assert "is not known now: no partitioner responds" in said
            assert not agent.usage.audit.violations
            async with partitioner(cluster):
                await until(lambda: driver_limits(state) == before)
                await until(lambda: "no partitioner" not in said_of_shares(agent))


async def test_limits_are_read_back_at_once_when_a_gpu_responds_again(
    driver_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its driver may have been loaded anew, or have torn it down."""
    assert driver_folder.is_dir()
    monkeypatch.setenv(VARIABLE, "")
    async with limited_cluster("1xT4", tmp_path / "hook", "dmem") as cluster:
        state = cluster.node.kubelet.files.gpu_state
        agent = cluster.agent
        assert agent is not None
        await cluster.run_pod("one", share(0, 2_000, **HELD))
        before = driver_limits(state)
        monkeypatch.setattr(limit_audit, "AUDIT_S", 3600.0)
        monkeypatch.setattr(limit_audit, "AGAIN_S", 3600.0)
        agent.node.audit_due.set()  # the next pause is one of these
        await until(lambda: not agent.node.audit_due.is_set())
        cluster.inject(gpu0=VANISH)
        await until(lambda: not agent.node.devices[0].healthy)
        control(state, "forget-limits")

        cluster.inject()

        await until(lambda: driver_limits(state) == before)
