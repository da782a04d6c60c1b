"""An agent whose containers share a server of MPS: limits, what it reports, and repair for all."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.node_agent.enforcers.mps import SharedMps
from services.node_agent.gpus.inventory import DeviceSample, GpuProcess, SharingConfig
from services.node_agent.mps import watch
from services.node_agent.mps.daemon import MpsTarget
from services.node_agent.mps.shared_servers import SharedServers
from services.node_agent.service import NodeAgent
from shared.dialects.mps import PIPE_VARIABLE, PIPES, shared_daemon_name
from shared.model.events.node_events import ViolationReason
from shared.model.leases.lease import Lease
from shared.model.names import NodeName
from simcluster.gpu_driver.control import VARIABLE
from simcluster.gpu_driver.control import control as driver_control
from simcluster.kubelet.programs.gpu_programs import environment
from simcluster.node_agent.driver import STATE
from simcluster.node_agent.gpus import uuid_of
from tests.support.gpu_driver import GpuDriver, GpuLoad
from tests.support.mps import ControlDaemon
from tests.support.node_agent.agent import (
    NUMBER,
    OneNodeCluster,
    lease_of,
    make_process,
    one_node_cluster,
    share,
)
from tests.support.simcluster.kubelet import NODE, pod
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only user 0 may own such a server")
GPU = uuid_of(NodeName(NODE), 0)


@pytest.fixture
async def cluster(
    driver_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[OneNodeCluster]:
    assert driver_folder.is_dir()
    monkeypatch.setenv(VARIABLE, "")  # the agent sets it
    monkeypatch.setattr(watch, "PROBE_S", 3600.0)  # tests probe by themselves
    async with one_node_cluster("1xT4") as cluster:
        cluster.changes |= {"gpu_driver_dir": cluster.root / "gpus", "mps": "shared"}
        try:
            yield cluster
        finally:
            daemon = control(cluster)
            if daemon.pipes.exists():
                daemon.close()


@asynccontextmanager
async def r615(cluster: OneNodeCluster) -> AsyncIterator[NodeAgent]:
    """An agent whose GPU's driver is R615."""
    async with cluster.running() as agent:
        driver_control(cluster.root / "gpus" / STATE, "accounting", "dmem")
        await agent.watcher.probe()
        yield agent


def control(cluster: OneNodeCluster) -> ControlDaemon:
    directory = cluster.root / "agent" / "mps" / shared_daemon_name(GPU)
    return ControlDaemon(pipes=directory / "pipe", logs=directory / "log")


async def run(cluster: OneNodeCluster, name: str, slot: int, cores: int) -> Lease:
    created = cluster.node.create(pod(name, limits={NUMBER: 1}))["metadata"]
    held: dict[str, Any] = dict.fromkeys(("memory", "compute", "mode"), "mps-shared")
    part = share(cores_percent=cores, slot=slot, fence=slot + 1, **held)
    lease = cluster.ledger.grant(lease_of(created["uid"], part, name=name))
    await cluster.node.phase(name, "Running")
    return lease


def program(cluster: OneNodeCluster, driver_folder: Path, name: str) -> GpuLoad:
    """Start a program in a container of the node, as its kubelet does."""
    state = cluster.root / "gpus" / STATE
    driver = GpuDriver(folder=driver_folder, state=state)
    return driver.load(**environment(cluster.node.container(name), driver_folder, state))


def shared_of(agent: NodeAgent) -> tuple[SharedMps, SharedServers]:
    enforcer = agent.mps.enforcer
    assert isinstance(enforcer, SharedMps)
    assert isinstance(enforcer.daemons, SharedServers)
    return enforcer, enforcer.daemons


async def test_containers_of_a_gpu_have_their_limits_and_only_their_own_directory(
    cluster: OneNodeCluster, driver_folder: Path
) -> None:
    async with r615(cluster) as agent:
        [device] = agent.node.devices
        assert "mps-shared" in device.offer.memory
        assert "mps-shared" in device.offer.compute
        reasons = {missing.name: missing.reason for missing in device.missing}
        assert "--mps of the node agent to private" in reasons["mps"]
        [gpu] = await agent.watcher.driver.discover()
        enforcer, servers = shared_of(agent)
        assert "R615" in enforcer.missing(replace(gpu, driver="580.82"), SharingConfig())
        one = await run(cluster, "one", slot=0, cores=30)
        two = await run(cluster, "two", slot=1, cores=60)

        mounted = [cluster.node.container(name).mounts for name in ("one", "two")]
        pipes = [
            {mount.host_path for mount in mounts if mount.container_path == PIPES}
            for mounts in mounted
        ]
        assert not pipes[0] & pipes[1]
        loads = [program(cluster, driver_folder, name) for name in ("one", "two")]
        try:
            assert loads[0].fits("700m")
            assert not loads[0].fits("100m")  # its context takes 256 MiB
            for lease, load in zip((one, two), loads, strict=True):
                target = MpsTarget(lease.pod, "main", GPU)
                await until(partial(servers_have, servers, target, load.pid))
            await agent.usage.audit.audit()
            assert not agent.usage.audit.violations
            read = agent.usage.audit.read[two.pod, "main", GPU]
            assert (read.memory_bytes, read.cores_percent) == (1000 << 20, 60)
        finally:
            for load in loads:
                load.kill()


async def servers_have(servers: SharedServers, target: MpsTarget, pid: int) -> bool:
    return (await servers.get(target)).clients == {pid}


async def test_a_program_in_the_namespace_of_another_container_is_a_violation(
    cluster: OneNodeCluster, driver_folder: Path
) -> None:
    async with r615(cluster) as agent:
        one = await run(cluster, "one", slot=0, cores=30)
        two = await run(cluster, "two", slot=1, cores=60)
        enforcer, servers = shared_of(agent)
        state = cluster.root / "gpus" / STATE
        variables = environment(cluster.node.container("one"), driver_folder, state)
        daemon = await servers.get(MpsTarget(two.pod, "main", GPU))
        stranger = GpuDriver(folder=driver_folder, state=state).load(
            **variables | {PIPE_VARIABLE: daemon.pipes}
        )
        container_id = "a" * 64
        make_process(cluster, stranger.pid, one.pod, container_id)
        enforcer.proc = cluster.root / "proc"
        listed = {pod.uid: pod for pod in await agent.node.kubelet.list_pods()}
        shown = replace(listed[one.pod], container_ids={container_id: "main"})

        async def sample() -> tuple[DeviceSample, ...]:
            running = (GpuProcess(pid=stranger.pid, memory_bytes=1),)
            return (DeviceSample(device=GPU, index=0, model="T4", processes=running),)

        async def pods() -> Any:
            return (shown, listed[two.pod])

        enforcer.sample = sample
        assert enforcer.listed is not None
        enforcer.listed.list_pods = pods
        enforcer.listed.read_at = 0.0
        try:
            await until(
                lambda: servers_have(servers, MpsTarget(two.pod, "main", GPU), stranger.pid)
            )

            await agent.usage.audit.audit()
        finally:
            stranger.kill()

        [violation] = agent.usage.audit.violations
        assert (violation.pod, violation.reason) == (one.pod, ViolationReason.MPS_BYPASSED)
        assert f"(PIDs {stranger.pid} on the node)" in violation.message


async def test_a_wedged_server_is_repaired_once_for_all_its_containers_which_are_told(
    cluster: OneNodeCluster, driver_folder: Path
) -> None:
    async with r615(cluster) as agent:
        leases = [
            await run(cluster, name, slot, cores=30) for slot, name in enumerate(("one", "two"))
        ]
        enforcer, servers = shared_of(agent)
        load = program(cluster, driver_folder, "one")
        target = MpsTarget(leases[0].pod, "main", GPU)
        await until(lambda: servers_have(servers, target, load.pid))
        [server] = (await servers.get(target)).servers
        control(cluster).fail(wedged=[server.pid])
        repaired: list[MpsTarget] = []
        repair = servers.repair

        async def watched(target: MpsTarget) -> str:
            assert "MpsWedged" in agent.node.closed[GPU]
            repaired.append(target)
            servers.node.probe_s = 60.0  # on a busy machine
            return await repair(target)

        servers.repair = watched  # type: ignore[method-assign]
        try:
            await agent.mps.probe_once()
        finally:
            load.kill()

        assert len(repaired) == 1
        assert not agent.node.closed
        assert {finding.pod for finding in enforcer.findings} == {lease.pod for lease in leases}
        assert all("with 2 namespaces" in finding.message for finding in enforcer.findings)
        await agent.mps.probe_once()
        assert not enforcer.findings
