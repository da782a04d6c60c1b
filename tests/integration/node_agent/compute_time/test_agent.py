"""An agent that has GPU time hold cores: its containers' programs, and what it restores."""

import asyncio
import os
import struct
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from services.node_agent.compute_time.steering import TimeSteering
from services.node_agent.compute_time.time_files import read_time_limits, read_time_use
from services.node_agent.compute_time.time_layouts import USE_BYTES, TimeLimit
from services.node_agent.enforcers.compute_time import limits_path, use_path
from services.node_agent.gpus.inventory import DeviceSample, GpuProcess
from services.node_agent.isolation.region import Region
from services.node_agent.isolation.region_image import region_path_of
from services.node_agent.isolation.region_reader import read_region
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from shared.dialects.hami_core import PodMemo
from shared.dialects.nvidia.dialect import COUNT
from shared.model.events.node_events import ViolationReason
from shared.model.events.request_reply import LimitsRequest
from shared.model.leases.lease import Lease
from shared.model.names import NodeName
from simcluster.gpu_driver.control import VARIABLE
from simcluster.kubelet.programs.gpu_programs import environment
from simcluster.node_agent.driver import STATE
from simcluster.node_agent.gpus import uuid_of
from tests.support.gpu_driver import GpuDriver, GpuLoad, gpu
from tests.support.node_agent.agent import (
    NUMBER,
    OneNodeCluster,
    lease_of,
    one_node_cluster,
    share,
)
from tests.support.simcluster.kubelet import NODE, pod
from tests.support.waiting import until

GPU = uuid_of(NodeName(NODE), 0)
S = 1_000_000_000


@pytest.fixture
async def cluster(
    driver_folder: Path, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[OneNodeCluster]:
    assert driver_folder.is_dir()
    monkeypatch.setenv(VARIABLE, "")  # the agent sets it
    async with one_node_cluster("1xT4") as cluster:
        cluster.changes |= {
            "gpu_driver_dir": cluster.root / "gpus",
            "compute_by_time": "force",
            "time_library": library,
        }
        yield cluster


def time_lease(uid: str, name: str, cores: int = 30, slot: int = 0, **more: Any) -> Lease:
    held: dict[str, Any] = {"memory": "hami-core", "compute": "time", "mode": "time"}
    part = share(cores_percent=cores, slot=slot, fence=slot + 1, **(held | more))
    return lease_of(uid, part, name=name)


async def run(cluster: OneNodeCluster, name: str, cores: int = 30, slot: int = 0) -> Lease:
    created = cluster.node.create(pod(name, limits={NUMBER: 1}))["metadata"]
    lease = cluster.ledger.grant(time_lease(created["uid"], name, cores, slot))
    await cluster.node.phase(name, "Running")
    return lease


def entry(cluster: OneNodeCluster, lease: Lease) -> CheckpointEntry:
    assert cluster.agent is not None
    entries = cluster.agent.checkpoint.entries
    return next(entry for entry in entries if entry.allocation.pod == lease.pod)


def limit(cluster: OneNodeCluster, lease: Lease) -> TimeLimit:
    path = limits_path(entry(cluster, lease))
    assert path is not None
    limits = read_time_limits(path, [GPU])
    assert limits
    return limits[0]


def use_file(cluster: OneNodeCluster, lease: Lease) -> Path:
    path = use_path(entry(cluster, lease))
    assert path is not None
    return path


def write_use(path: Path, **fields: int) -> None:
    """Write into the first bucket, as any program of the container can."""
    offsets = {"ready_at": 8, "charged_ns": 16, "asked_at": 24, "long_at": 32, "shared_at": 40}
    offsets |= {"scale": 52, "compared_at": 56}
    with path.open("r+b") as file:
        for name, value in fields.items():
            kind = "<I" if name == "scale" else "<q"
            os.pwrite(file.fileno(), struct.pack(kind, value), offsets[name])


def program(cluster: OneNodeCluster, driver_folder: Path, name: str) -> GpuLoad:
    """Start a program in a container of the node, as its kubelet does."""
    state = cluster.root / "gpus" / STATE
    container = cluster.node.container(name)
    driver = GpuDriver(folder=driver_folder, state=state)
    return driver.load(**environment(container, driver_folder, state))


async def test_it_is_off_and_says_so_unless_it_is_set(cluster: OneNodeCluster) -> None:
    cluster.changes["compute_by_time"] = "off"
    async with cluster.running() as agent:
        [device] = agent.node.devices

        assert "time" not in device.offer.compute
        reasons = {missing.name: missing.reason for missing in device.missing}
        assert "--compute-by-time" in reasons["time"]
    cluster.changes |= {"compute_by_time": "force", "time_library": cluster.root / "none"}
    async with cluster.running() as agent:
        reasons = {missing.name: missing.reason for missing in agent.node.devices[0].missing}

        assert "make native" in reasons["time"]


async def test_a_pods_programs_get_their_percent_beside_memory_by_hami_core(
    cluster: OneNodeCluster, driver_folder: Path
) -> None:
    async with cluster.running() as agent:
        assert agent.node.devices[0].offer.compute == ("time", "hami-core")
        lease = await run(cluster, "one")
        container = cluster.node.container("one")
        region = read_region(region_path_of(entry(cluster, lease).limits) or Path("none"))

        assert container.env["GPU_CORE_UTILIZATION_POLICY"] == "disable"
        assert isinstance(region, Region)
        assert (region.memory_limits[0], set(region.core_limits)) == (1000 << 20, {100})
        assert limit(cluster, lease).percent == 30
        load = program(cluster, driver_folder, "one")
        try:
            assert not load.fits("2g")
            load.send("flood 300s 1000 kernel 1")
            driver = GpuDriver(folder=driver_folder, state=cluster.root / "gpus" / STATE)
            card = replace(gpu(1), uuid=GPU)

            async def percent() -> float:
                before = driver.ran(card)
                await asyncio.sleep(1)
                return driver.ran(card)[load.pid].percent_since(before[load.pid])

            await until(percent, lambda measured: 28 <= measured <= 32)
            assert read_time_use(use_file(cluster, lease), 1)
        finally:
            load.kill()


async def test_limits_are_changed_for_running_programs_in_the_same_file(
    cluster: OneNodeCluster,
) -> None:
    async with cluster.running() as agent:
        lease = await run(cluster, "one")
        path = limits_path(entry(cluster, lease))
        assert path is not None
        before = path.stat().st_ino
        smaller = structs.replace(
            time_lease(lease.pod, "one", cores=10, memory_mib=900),
            version=lease.version + 1,
            resized_at=lease.created_at + 9,
        )

        reply = await agent.update_limits(LimitsRequest(node=NodeName(NODE), lease=smaller))

        assert reply.applied, reply.reason
        assert limit(cluster, lease).percent == 10
        assert path.stat().st_ino == before
        await agent.usage.audit.audit()
        assert not agent.usage.audit.violations


@pytest.mark.parametrize(
    ("forge", "text"),
    [
        (lambda path: write_use(path, scale=0, compared_at=time.monotonic_ns()), "multiplied"),
        (lambda path: write_use(path, compared_at=time.monotonic_ns() + 90 * S), "future"),
        (lambda path: write_use(path, ready_at=1 << 62), "waits"),
        (lambda path: path.write_bytes(b"\xff" * USE_BYTES), "cut off"),
        (lambda path: os.truncate(path, 8), "cut off"),
        (lambda path: (path.unlink(), path.symlink_to("/etc/passwd")), "cut off"),
        (lambda path: (path.unlink(), path.mkdir(), (path / "x").touch()), "cut off"),
        (lambda path: path.unlink(), "gone"),
    ],
)
async def test_what_a_program_wrote_into_the_shared_file_is_noticed_and_restored(
    cluster: OneNodeCluster, forge: Callable[[Path], object], text: str
) -> None:
    async with cluster.running() as agent:
        lease = await run(cluster, "one")
        path = use_file(cluster, lease)
        await agent.usage.audit.audit()
        assert not agent.usage.audit.violations
        forge(path)

        await agent.usage.audit.audit()

        [violation] = agent.usage.audit.violations
        assert violation.reason is ViolationReason.TAMPERED
        assert text in violation.message
        await agent.usage.audit.audit()
        assert not agent.usage.audit.violations
        uses = read_time_use(path, 1)
        assert uses is not None
        assert uses[0].ready_at <= time.monotonic_ns()


async def test_limits_that_another_program_of_the_node_changed_are_put_back(
    cluster: OneNodeCluster,
) -> None:
    async with cluster.running() as agent:
        lease = await run(cluster, "one")
        path = limits_path(entry(cluster, lease))
        assert path is not None
        path.write_bytes(path.read_bytes().replace(struct.pack("<II", 30, 30), b"\x63\0\0\0" * 2))
        assert limit(cluster, lease).percent == 99

        await agent.usage.audit.audit()

        [violation] = agent.usage.audit.violations
        assert "99 % of the cores" in violation.message
        assert limit(cluster, lease).percent == 30


async def steering_of(
    cluster: OneNodeCluster, policy: str, samples: list[DeviceSample], clock: list[int]
) -> TimeSteering:
    agent = cluster.agent
    assert agent is not None

    async def sample() -> tuple[DeviceSample, ...]:
        return tuple(samples)

    return TimeSteering(
        agent.node,
        agent.steering.enforcer,
        policy,
        sample=sample,
        proc=cluster.root / "proc",
        now_ns=lambda: clock[0],
    )


def make_process(cluster: OneNodeCluster, pid: int, uid: str) -> None:
    folder = cluster.root / "proc" / str(pid)
    folder.mkdir(parents=True)
    (folder / "cgroup").write_text(f"0::/kubepods/pod{uid}/{'a' * 64}\n")
    (folder / "status").write_text("NSpid:\t1\n")
    (folder / "stat").write_text(f"{pid} (x) S " + "0 " * 48)


async def test_what_one_leaves_unused_the_others_may_use_by_the_policy_default(
    cluster: OneNodeCluster,
) -> None:
    async with cluster.running():
        busy = await run(cluster, "busy", 20)
        idle = await run(cluster, "idle", 50, slot=1)
        clock = [time.monotonic_ns() + 3600 * S]  # the agent's own steering sees nothing active
        write_use(use_file(cluster, busy), asked_at=clock[0])
        steering = await steering_of(cluster, "default", [], clock)

        await steering.steer()
        alone = limit(cluster, busy).allowed, limit(cluster, idle).allowed
        write_use(use_file(cluster, idle), asked_at=clock[0])
        await steering.steer()
        both = limit(cluster, busy).allowed, limit(cluster, idle).allowed
        forced = await steering_of(cluster, "force", [], clock)
        await forced.steer()

        assert alone == (100, 50)
        assert both == (28, 71)
        assert (limit(cluster, busy).allowed, limit(cluster, idle).allowed) == (20, 50)


async def test_what_all_leave_unused_goes_to_the_first_priority_that_computes(
    cluster: OneNodeCluster,
) -> None:
    async with cluster.running():
        later = await run(cluster, "later", 20)
        created = cluster.node.create(pod("first", limits={COUNT: 1}))["metadata"]
        lease = time_lease(created["uid"], "first", 50, slot=1)
        memo = msgspec.json.encode(PodMemo(priorities={"main": 0})).decode()
        first = cluster.ledger.grant(structs.replace(lease, dialect="nvidia", memo=memo))
        await cluster.node.phase("first", "Running")
        clock = [time.monotonic_ns() + 3600 * S]
        write_use(use_file(cluster, later), asked_at=clock[0])
        steering = await steering_of(cluster, "default", [], clock)

        await steering.steer()
        alone = limit(cluster, later).allowed, limit(cluster, first).allowed
        write_use(use_file(cluster, first), asked_at=clock[0])
        await steering.steer()

        assert alone == (100, 50), "none of a higher priority computes"
        assert (limit(cluster, later).allowed, limit(cluster, first).allowed) == (20, 80)


async def test_limits_of_a_pod_that_is_being_changed_are_written_in_a_later_turn(
    cluster: OneNodeCluster,
) -> None:
    async with cluster.running() as agent:
        busy = await run(cluster, "busy", 20)
        changing = await run(cluster, "changing", 30, slot=1)
        clock = [time.monotonic_ns() + 3600 * S]
        for lease in (busy, changing):
            write_use(use_file(cluster, lease), asked_at=clock[0])
        steering = await steering_of(cluster, "default", [], clock)

        def allowed() -> tuple[int, int]:
            return limit(cluster, busy).allowed, limit(cluster, changing).allowed

        async with agent.checkpoint.changing.hold(changing.pod):
            async with asyncio.timeout(5):
                await steering.steer()
            meanwhile = allowed()
        await steering.steer()

        assert meanwhile == (40, 30), "the other pod's limits do not wait"
        assert allowed() == (40, 60)


async def test_long_kernels_that_compete_are_measured_by_nvml(cluster: OneNodeCluster) -> None:
    async with cluster.running():
        leases = [await run(cluster, "one", 25), await run(cluster, "two", 75, slot=1)]
        for pid, lease in zip((71, 72), leases, strict=True):
            make_process(cluster, pid, lease.pod)
        processes = tuple(
            GpuProcess(pid=pid, memory_bytes=1, busy_percent=percent)
            for pid, percent in ((71, 24), (72, 70))
        )
        samples = [DeviceSample(device=GPU, index=0, model="T4", processes=processes)]
        clock = [time.monotonic_ns() + 3600 * S]
        steering = await steering_of(cluster, "force", samples, clock)
        for lease in leases:
            write_use(use_file(cluster, lease), asked_at=clock[0])
        for _ in range(2):
            await steering.steer()
        short = [limit(cluster, lease).measured_at for lease in leases]
        write_use(use_file(cluster, leases[0]), long_at=clock[0])
        for _ in range(2):
            await steering.steer()

        assert short == [0, 0], "nothing is measured for short kernels"
        assert [limit(cluster, lease).measured for lease in leases] == [24, 70]
        assert [limit(cluster, lease).measured_at for lease in leases] == [clock[0]] * 2


async def test_a_container_that_is_charged_more_than_its_limit_is_reported(
    cluster: OneNodeCluster,
) -> None:
    async with cluster.running() as agent:
        lease = await run(cluster, "one", 30)
        clock = [time.monotonic_ns() + 3600 * S]
        steering = await steering_of(cluster, "force", [], clock)
        await steering.steer()
        clock[0] += 11 * S
        write_use(use_file(cluster, lease), charged_ns=9 * S)  # and it resets its bucket
        await steering.steer()

        [violation] = agent.node.enforcers.findings
        assert violation.reason is ViolationReason.CORES_NOT_LIMITED
        assert "took 81 % of the GPU's time, and 30 % is its limit" in violation.message
        clock[0] += 11 * S
        await steering.steer()
        assert not agent.node.enforcers.findings


async def test_the_agent_removes_a_pods_files_after_it_has_ended(cluster: OneNodeCluster) -> None:
    async with cluster.running() as agent:
        lease = await run(cluster, "one")
        files = [limits_path(entry(cluster, lease)), use_file(cluster, lease)]
        assert all(path is not None and path.exists() for path in files)

        agent.node.files.timing = replace(agent.node.files.timing, new_files_s=0)
        await agent.node.enforcers.end(set(), set())

        assert not any(path is not None and path.exists() for path in files)
