"""An agent that has MPS hold shares: gate, read back, drain, repair, and what it reports."""

import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from services.node_agent.enforcers.mps import Mps
from services.node_agent.gpus.inventory import DeviceSample, GpuProcess, SharingConfig
from services.node_agent.kubelet.pods import Deletion
from services.node_agent.mps import watch
from services.node_agent.mps.daemon import MpsTarget, WedgedError
from services.node_agent.mps.daemon_directories import MpsNode
from services.node_agent.mps.daemons import MpsDaemons
from services.node_agent.service import NodeAgent
from shared.dialects.mps import daemon_name
from shared.model.errors import UnavailableError
from shared.model.events.node_events import ViolationReason
from shared.model.events.request_reply import LimitsRequest
from shared.model.leases.lease import Lease
from shared.model.names import NodeName
from shared.model.requests.claim import DraMode, device_name
from simcluster.apimachinery import schemas
from simcluster.apimachinery.objects import Json
from simcluster.apimachinery.schemas import published
from simcluster.gpu_driver.control import VARIABLE
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
from tests.support.node_agent.claims import (
    claim_lease,
    pod_and_claim,
    registered,
    result,
    slices_of,
)
from tests.support.simcluster.kubelet import NODE, pod
from tests.support.waiting import until

GPU = uuid_of(NodeName(NODE), 0)


async def drain_due(agent: NodeAgent) -> None:
    for entries in agent.mps.due().values():
        await agent.mps.drain(entries)


@pytest.fixture
async def cluster(
    driver_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[OneNodeCluster]:
    assert driver_folder.is_dir()
    monkeypatch.setenv(VARIABLE, "")  # the agent sets it
    monkeypatch.setattr(watch, "PROBE_S", 3600.0)  # tests probe by themselves
    async with one_node_cluster("1xT4") as cluster:
        cluster.changes |= {"gpu_driver_dir": cluster.root / "gpus", "mps": "private"}
        try:
            yield cluster
        finally:
            for directory in (cluster.root / "agent" / "mps").glob("*"):
                ControlDaemon(pipes=directory / "pipe", logs=directory / "log").close()


async def run(cluster: OneNodeCluster, name: str, cores: int = 30, slot: int = 0) -> Lease:
    created = cluster.node.create(pod(name, limits={NUMBER: 1}))["metadata"]
    held: dict[str, Any] = {"memory": "mps", "compute": "mps", "mode": "mps"}
    part = share(cores_percent=cores, slot=slot, fence=slot + 1, **held)
    lease = cluster.ledger.grant(lease_of(created["uid"], part, name=name))
    await cluster.node.phase(name, "Running")
    return lease


def control(cluster: OneNodeCluster, lease: Lease) -> ControlDaemon:
    directory = cluster.root / "agent" / "mps" / daemon_name(lease.pod, "main")
    return ControlDaemon(pipes=directory / "pipe", logs=directory / "log")


def program(cluster: OneNodeCluster, driver_folder: Path, name: str) -> GpuLoad:
    """Start a program in a container of the node, as its kubelet does."""
    state = cluster.root / "gpus" / STATE
    container = cluster.node.container(name)
    driver = GpuDriver(folder=driver_folder, state=state)
    return driver.load(**environment(container, driver_folder, state))


def mps_of(agent: NodeAgent) -> tuple[Mps, MpsDaemons]:
    enforcer = agent.mps.enforcer
    assert isinstance(enforcer.daemons, MpsDaemons)
    return enforcer, enforcer.daemons


async def test_it_is_off_and_says_so_unless_it_is_set(cluster: OneNodeCluster) -> None:
    cluster.changes["mps"] = "off"
    async with cluster.running() as agent:
        [device] = agent.node.devices
        reasons = {missing.name: missing.reason for missing in device.missing}

        assert "mps" not in (*device.offer.memory, *device.offer.compute)
        assert "not confirmed on a GPU yet" in reasons["mps"]
        [gpu] = await agent.watcher.driver.discover()
        enforcer = Mps(MpsDaemons(MpsNode(cluster.root / "mps")))
        old = enforcer.missing(replace(gpu, driver="470.82"), SharingConfig())
        exclusive = enforcer.missing(replace(gpu, exclusive_process=True), SharingConfig())
        assert "R495" in old
        assert "compute mode is not Default" in exclusive


async def test_a_containers_programs_are_clients_of_its_own_daemon_and_have_its_limits(
    cluster: OneNodeCluster, driver_folder: Path
) -> None:
    async with cluster.running() as agent:
        [device] = agent.node.devices
        assert device.offer.memory[0] == device.offer.compute[0] == "mps"
        enforcer, daemons = mps_of(agent)
        enforcer.young_s = 3600.0
        lease = await run(cluster, "one")
        two = await run(cluster, "two", cores=60, slot=1)
        assert cluster.env("one")["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == f"{GPU}=1000M"
        assert control(cluster, lease).do("get_default_active_thread_percentage") == "30.0"
        assert control(cluster, two).do("get_default_active_thread_percentage") == "60.0"
        load = program(cluster, driver_folder, "one")
        try:
            assert load.fits("700m")
            assert not load.fits("100m")  # its context takes 256 MiB
            await until(lambda: control(cluster, lease).clients == [load.pid])
            assert not control(cluster, two).clients
            await agent.usage.audit.audit()
            assert not agent.usage.audit.violations
            read = agent.usage.audit.read[lease.pod, "main", GPU]
            assert (read.memory_bytes, read.cores_percent) == (1000 << 20, 30)
        finally:
            load.kill()
        await cluster.release(lease)
        await cluster.delete_pod("one")
        await enforcer.end({two.pod}, set())
        assert len(await daemons.list()) == 2, "one that has just been started stays"
        enforcer.young_s = 0.0
        await enforcer.end({two.pod}, set())
        assert [started.target.holder for started in await daemons.list()] == [two.pod]
        assert not control(cluster, lease).pipes.exists()


async def test_no_container_starts_while_its_daemon_does_not_have_its_limits(
    cluster: OneNodeCluster,
) -> None:
    async with cluster.running() as agent:
        lease = await run(cluster, "one")
        entry = agent.checkpoint.entries[0]
        other = control(cluster, lease)
        other.do("quit")
        other.fail(ignores_limits=True)
        await until(lambda: not (other.pipes / "control").exists())
        other.start()  # by itself, without limits, and it keeps none
        assert other.do("get_default_active_thread_percentage") == "100.0"

        await agent.node.enforcers.prepare(entry, starting=True)

        assert other.do("get_default_active_thread_percentage") == "30.0", "it was replaced"
        other.fail()
        other.do("set_default_active_thread_percentage 90")
        other.fail(ignores_limits=True)
        with pytest.raises(UnavailableError, match="90 % of the cores"):
            await agent.node.enforcers.prepare(entry, starting=True)
        await agent.usage.audit.audit()
        [violation] = agent.usage.audit.violations
        assert violation.reason is ViolationReason.LIMIT_DIFFERS
        other.fail()
        await agent.usage.audit.audit()
        await agent.usage.audit.audit()
        assert not agent.usage.audit.violations


async def test_a_daemon_that_died_is_reported_and_runs_again_with_its_limits(
    cluster: OneNodeCluster,
) -> None:
    async with cluster.running() as agent:
        lease = await run(cluster, "one")
        _, daemons = mps_of(agent)
        os.kill((await daemons.get(MpsTarget(lease.pod, "main"))).pid, signal.SIGKILL)

        await agent.usage.audit.audit()

        [violation] = agent.usage.audit.violations
        assert violation.reason is ViolationReason.LIMIT_MISSING
        assert "its daemon does not run" in violation.message
        assert control(cluster, lease).do("get_default_active_thread_percentage") == "30.0"


async def test_clients_are_ended_before_the_kill_and_not_in_the_first_half_of_the_grace_period(
    cluster: OneNodeCluster, driver_folder: Path
) -> None:
    async with cluster.running() as agent:
        lease = await run(cluster, "one")
        load = program(cluster, driver_folder, "one")
        try:
            await until(lambda: control(cluster, lease).clients == [load.pid])
            now = agent.node.clock.now()

            async def deleted() -> Any:
                return {lease.pod: Deletion(now + 3600, 3600)}

            agent.node.kubelet.list_ending = deleted  # type: ignore[method-assign]
            await agent.mps.look()
            await drain_due(agent)
            assert control(cluster, lease).clients == [load.pid]

            async def killed_soon() -> Any:
                return {lease.pod: Deletion(agent.node.clock.now() + 0.1, 1)}

            agent.node.kubelet.list_ending = killed_soon  # type: ignore[method-assign]
            await agent.mps.look()
            await drain_due(agent)
            await until(lambda: not control(cluster, lease).clients)  # its own loop may be at it
            assert load.do("alloc 1m") == "error 810"
        finally:
            load.kill()


async def test_a_wedged_server_closes_its_gpu_until_it_is_repaired_and_says_what_was_done(
    cluster: OneNodeCluster, driver_folder: Path
) -> None:
    async with cluster.running() as agent:
        lease = await run(cluster, "one")
        load = program(cluster, driver_folder, "one")
        enforcer, daemons = mps_of(agent)
        try:
            [server] = await until(lambda: control(cluster, lease).servers)
            control(cluster, lease).fail(wedged=[server])
            seen: list[str] = []
            repair = daemons.repair

            async def watched(target: MpsTarget) -> str:
                seen.extend(agent.node.closed.values())
                daemons.node.probe_s = 60.0  # on a busy machine
                return await repair(target)

            daemons.repair = watched  # type: ignore[method-assign]
            await agent.mps.probe_once()

            assert "MpsWedged" in seen[0]
            assert not agent.node.closed
            [finding] = enforcer.findings
            assert finding.reason is ViolationReason.MPS_WEDGED
            assert "started it again, and read its limits back" in finding.message
            assert control(cluster, lease).do("get_default_active_thread_percentage") == "30.0"
            await agent.mps.probe_once()
            assert not enforcer.findings
        finally:
            load.kill()


async def test_a_probe_that_is_not_carried_out_ends_no_work_and_the_gpu_stays_closed(
    cluster: OneNodeCluster, driver_folder: Path
) -> None:
    async with cluster.running() as agent:
        lease = await run(cluster, "one")
        load = program(cluster, driver_folder, "one")
        _, daemons = mps_of(agent)
        errors = [WedgedError("a new client hung"), UnavailableError("no partitioner responds")]
        probe = daemons.probe

        async def lost(target: MpsTarget) -> None:
            if not errors:
                return await probe(target)
            raise errors.pop(0)

        daemons.probe = lost  # type: ignore[method-assign]
        daemons.node.probe_s = 60.0  # on a busy machine
        try:
            [server] = await until(lambda: control(cluster, lease).servers)
            await agent.mps.probe_once()

            assert not errors
            assert "MpsWedged" in next(iter(agent.node.closed.values()))
            assert control(cluster, lease).servers == [server]
            assert load.fits("1m")
            await agent.mps.probe_once()
            assert not agent.node.closed
        finally:
            load.kill()


async def test_a_process_that_is_no_client_of_its_server_is_a_violation(
    cluster: OneNodeCluster,
) -> None:
    async with cluster.running() as agent:
        lease = await run(cluster, "one")
        enforcer, _ = mps_of(agent)
        [listed] = await agent.node.kubelet.list_pods()
        container_id = next(iter(listed.container_ids), "a" * 64)
        shown = replace(listed, container_ids={container_id: "main"})
        make_process(cluster, 71, lease.pod, container_id)
        enforcer.proc = cluster.root / "proc"

        async def sample() -> tuple[DeviceSample, ...]:
            running = (GpuProcess(pid=71, memory_bytes=1), GpuProcess(pid=72, memory_bytes=1))
            return (DeviceSample(device=GPU, index=0, model="T4", processes=running),)

        async def pods() -> Any:
            return (shown,)

        enforcer.sample = sample
        assert enforcer.listed is not None
        enforcer.listed.list_pods = pods
        enforcer.listed.read_at = 0.0

        await agent.usage.audit.audit()

        [violation] = agent.usage.audit.violations
        assert violation.reason is ViolationReason.MPS_BYPASSED
        assert "(PIDs 71 on the node)" in violation.message


async def test_the_size_of_a_running_container_does_not_change(cluster: OneNodeCluster) -> None:
    async with cluster.running() as agent:
        lease = await run(cluster, "one")
        larger = lease_of(
            lease.pod,
            replace_share(lease, memory_mib=2000),
            name="one",
            version=lease.version + 1,
            resized_at=lease.created_at + 9,
        )

        reply = await agent.update_limits(LimitsRequest(node=NodeName(NODE), lease=larger))

        assert not reply.applied
        assert "create the pod again" in reply.reason
        assert control(cluster, lease).do(f"get_default_device_pinned_mem_limit {GPU}") == "1000M"


def replace_share(lease: Lease, **changes: Any) -> Any:
    held: dict[str, Any] = {"memory": "mps", "compute": "mps", "mode": "mps"}
    return share(**({"cores_percent": 30, "slot": 0, "fence": 1} | held | changes))


@pytest.fixture
def claims(cluster: OneNodeCluster) -> None:
    """Have the agent serve ResourceClaims."""
    cluster.changes |= {"dra": DraMode.CONDITIONS, "cdi_dir": cluster.node.kubelet.files.cdi}


def listed(cluster: OneNodeCluster) -> list[str]:
    return [
        device["name"]
        for slice_ in slices_of(cluster)
        for device in slice_["spec"].get("devices") or ()
    ]


@pytest.fixture
def compatibility_groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the API server store them, as Kubernetes 1.37 does behind its feature gate."""
    counted = published()["io.k8s.api.resource.v1.DeviceCounterConsumption"]["properties"]
    stored = {"type": "array", "items": {"type": "string"}, "x-protobuf": 3}
    with monkeypatch.context() as patch:
        patch.setitem(counted, "compatibilityGroups", stored)
        _read_schemas_again()
        yield
    _read_schemas_again()


def _read_schemas_again() -> None:
    schemas.resolved.cache_clear()
    schemas._checked.cache_clear()


@pytest.mark.usefixtures("claims", "compatibility_groups")
async def test_a_claim_that_selects_mps_is_listed_prepared_and_held_by_it(
    cluster: OneNodeCluster,
) -> None:
    name = device_name(GPU, "mps")
    async with cluster.running() as agent:
        await registered(cluster)
        await until(lambda: listed(cluster) == [device_name(GPU), name])
        _, stored = pod_and_claim(cluster, result(device=name))
        held: dict[str, Any] = {"memory": "mps", "compute": "mps", "mode": "mps"}
        part = share(container="gpu", memory_mib=1000, cores_percent=30, share_id="share-gpu-0")
        lease = claim_lease(stored, structs.replace(part, **held))
        cluster.ledger.grant(lease)

        await cluster.node.phase("one", "Running")

        assert cluster.env("one")["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == f"{GPU}=1000M"
        directory = cluster.root / "agent" / "mps" / daemon_name(lease.pod, "gpu")
        daemon = ControlDaemon(pipes=directory / "pipe", logs=directory / "log")
        assert daemon.do("get_default_active_thread_percentage") == "30.0"
        await cluster.push_lease(lease)
        await until(lambda: listed(cluster) == [name])
        assert agent.probes["dra"]() is None


@pytest.mark.usefixtures("claims")
@pytest.mark.parametrize("has_counters", [True, False])
async def test_no_mode_is_listed_where_the_api_server_drops_compatibility_groups(
    cluster: OneNodeCluster, has_counters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of Kubernetes 1.36 does so without a word; one without counters drops more."""
    create = cluster.api.store.create

    def without_field(resource: str, obj: Json, *, dry_run: bool = False) -> Json:
        if resource == "resourceslices" and not has_counters:
            for device in obj["spec"]["devices"]:
                device.pop("consumesCounters", None)
        return create(resource, obj, dry_run=dry_run)

    monkeypatch.setattr(cluster.api.store, "create", without_field)
    async with cluster.running():
        await registered(cluster)

        assert listed(cluster) == [device_name(GPU)]
        [only] = slices_of(cluster)
        assert "consumesCounters" not in only["spec"]["devices"][0]
