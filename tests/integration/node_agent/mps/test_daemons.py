"""Control daemons of MPS: their limits are read back, and only what was started is believed."""

import asyncio
import os
import shutil
import signal
import socketserver
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.cli.state_dir import SUPERVISED_VARIABLE
from services.node_agent.mps.control import PID_FILE, PROBE, PROBE_S
from services.node_agent.mps.daemon import MpsDaemon, MpsLimits, MpsTarget, WedgedError
from services.node_agent.mps.daemon_directories import MpsNode
from services.node_agent.mps.daemons import MpsDaemons
from services.node_agent.mps.remote_daemons import RemoteMpsDaemons
from services.node_agent.mps.runners import MpsRunners
from services.node_agent.mps.shared_servers import SharedServers
from services.node_agent.partition.partition_server import PartitionServer
from shared.dialects.mps import daemon_name
from shared.model.errors import RequestError, UnavailableError
from shared.model.names import DeviceUuid, PodUid
from simcluster.gpu_driver.mps_control import command
from tests.support.gpu_driver import GpuDriver, gpu
from tests.support.mps import ControlDaemon
from tests.support.node_agent.deep_directories import make_deep
from tests.support.waiting import until

ONE = gpu(1)
GPU = DeviceUuid(ONE.uuid)
TARGET = MpsTarget(PodUid("pod-1"), "main")
OTHER = MpsTarget(PodUid("pod-2"), "main")
PATIENT_S = 25.0
"""Time limit of a probe that succeeds, on a busy machine."""
LIMITS = MpsLimits(percent=25, memory_mib={GPU: 2048})


@pytest.fixture
async def daemons(driver: GpuDriver) -> AsyncIterator[MpsDaemons]:
    driver.create(ONE)
    root = Path(tempfile.mkdtemp(prefix="lh-mps-"))
    variables = (f"{name}={value}" for name, value in driver.environment.items())
    made = MpsDaemons(MpsNode(root, program=command(), probe_program=("env", *variables, *PROBE)))
    yield made
    for started in await made.list():
        control(made, started.target).fail()
        await made.stop(started.target, fence=started.fence)
    shutil.rmtree(root)


class Liar(socketserver.StreamRequestHandler):
    """Replies as a daemon with the limits of the lease."""

    def handle(self) -> None:
        line = self.rfile.readline()
        self.wfile.write(b"25.0\n" if b"percentage" in line else b"")


def control(daemons: MpsDaemons, target: MpsTarget = TARGET) -> ControlDaemon:
    directory = daemons.node.root / daemon_name(target.holder, target.container)
    return ControlDaemon(pipes=directory / "pipe", logs=directory / "log")


async def clients(daemons: MpsDaemons, count: int) -> MpsDaemon:
    async def attached() -> MpsDaemon | None:
        daemon = await daemons.get(TARGET)
        return daemon if len(daemon.clients) == count else None

    daemon = await until(attached)
    assert isinstance(daemon, MpsDaemon)
    return daemon


async def test_a_daemon_has_its_limits_before_it_can_have_a_client(
    daemons: MpsDaemons, driver: GpuDriver
) -> None:
    assert await daemons.missing_reason() == ""
    daemon = await daemons.ensure(TARGET, fence=1, limits=LIMITS)

    assert (daemon.held_percent(), daemon.held_mib(GPU), daemon.servers) == (25, 2048, ())
    load = driver.load(CUDA_MPS_PIPE_DIRECTORY=daemon.pipes)
    assert not load.fits("2g")
    assert load.fits("1g")
    [server] = (await clients(daemons, 1)).servers
    assert (server.status, server.percent, server.memory_mib) == ("ACTIVE", 25, {GPU: 2048})
    again = await daemons.ensure(TARGET, fence=1, limits=LIMITS)
    assert again.pid == daemon.pid
    await daemons.stop(TARGET, fence=1)
    assert not await daemons.list()
    assert not Path(daemon.pipes).exists()


async def test_a_daemon_of_leasehold_up_bears_the_mark_by_which_down_ends_it(
    daemons: MpsDaemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SUPERVISED_VARIABLE, "/state")

    daemon = await daemons.ensure(TARGET, fence=1, limits=LIMITS)

    environment = Path(f"/proc/{daemon.pid}/environ").read_bytes().split(b"\0")
    assert f"{SUPERVISED_VARIABLE}=/state".encode() in environment


async def test_a_daemon_that_does_not_apply_its_limits_is_ended_and_refused(
    daemons: MpsDaemons,
) -> None:
    control(daemons).fail(ignores_limits=True)
    wrong = await daemons.ensure(TARGET, fence=1, limits=LIMITS)
    larger = MpsLimits(percent=50, memory_mib={GPU: 4096})
    daemon = await daemons.ensure(TARGET, fence=2, limits=larger)

    assert (wrong.held_percent(), wrong.held_mib(GPU)) == (25, 2048)  # by its environment
    assert (daemon.held_percent(), daemon.held_mib(GPU)) == (25, 2048)  # the caller compares
    control(daemons).fail()
    daemon = await daemons.ensure(TARGET, fence=2, limits=larger)
    assert (daemon.held_percent(), daemon.held_mib(GPU)) == (50, 4096)


async def test_limits_that_were_changed_are_set_again_also_those_of_a_server(
    daemons: MpsDaemons, driver: GpuDriver
) -> None:
    daemon = await daemons.ensure(TARGET, fence=1, limits=LIMITS)
    driver.load(CUDA_MPS_PIPE_DIRECTORY=daemon.pipes)
    [server] = (await clients(daemons, 1)).servers
    control(daemons).do("set_default_active_thread_percentage 80")
    control(daemons).do(f"set_device_pinned_mem_limit {server.pid} {GPU} 9G")

    changed = await daemons.get(TARGET)
    again = await daemons.ensure(TARGET, fence=1, limits=LIMITS)

    assert (changed.held_percent(), changed.held_mib(GPU)) == (80, 9216)
    assert (again.held_percent(), again.held_mib(GPU)) == (25, 2048)


async def test_one_that_was_killed_or_replaced_is_started_again_with_its_limits(
    daemons: MpsDaemons,
) -> None:
    daemon = await daemons.ensure(TARGET, fence=1, limits=LIMITS)
    os.kill(daemon.pid, signal.SIGKILL)

    assert (await daemons.get(TARGET)).problem
    daemon = await daemons.ensure(TARGET, fence=1, limits=LIMITS)
    assert daemon.held_percent() == 25
    place = Path(daemon.pipes) / "control"
    place.unlink()
    with socketserver.ThreadingUnixStreamServer(str(place), Liar) as impostor:
        thread = threading.Thread(target=impostor.serve_forever)
        thread.start()
        problem = (await daemons.get(TARGET)).problem
        await asyncio.to_thread(impostor.shutdown)
        thread.join()
    assert "another process is in its place" in problem
    again = await daemons.ensure(TARGET, fence=1, limits=LIMITS)
    assert again.held_mib(GPU) == 2048
    assert not (await daemons.get(TARGET)).problem


async def test_a_link_that_a_container_leaves_does_not_lead_to_anothers_daemon(
    daemons: MpsDaemons, driver: GpuDriver
) -> None:
    other = await daemons.ensure(OTHER, fence=1, limits=LIMITS)
    load = driver.load(CUDA_MPS_PIPE_DIRECTORY=other.pipes)
    pipes = Path((await daemons.ensure(TARGET, fence=1, limits=LIMITS)).pipes)
    (pipes / "control").unlink()
    (pipes / "control").symlink_to(Path(other.pipes) / "control")

    assert (await daemons.get(TARGET)).problem
    with pytest.raises(UnavailableError, match="is a link"):
        await daemons.terminate(TARGET, (load.pid,))
    await daemons.stop(TARGET, fence=1)

    assert load.fits("1m")
    assert not pipes.exists()
    assert (await daemons.get(OTHER)).pid == other.pid


async def test_a_directory_in_which_a_container_made_anything_is_removed(
    daemons: MpsDaemons,
) -> None:
    daemon = await daemons.ensure(TARGET, fence=1, limits=LIMITS)
    pipes = Path(daemon.pipes)
    (pipes / PID_FILE).unlink()
    os.mkfifo(pipes / PID_FILE)
    make_deep(pipes / "cache")

    assert (await daemons.get(TARGET)).pid == 0
    os.kill(daemon.pid, signal.SIGKILL)
    again = await daemons.ensure(TARGET, fence=1, limits=LIMITS)
    make_deep(pipes / "cache")
    await daemons.stop(TARGET, fence=1)

    assert again.held_percent() == 25
    assert not pipes.parent.exists()


async def test_an_older_fence_changes_nothing(daemons: MpsDaemons) -> None:
    await daemons.ensure(TARGET, fence=5, limits=LIMITS)

    with pytest.raises(RequestError, match="fence 5"):
        await daemons.ensure(TARGET, fence=4, limits=MpsLimits(percent=100, memory_mib={GPU: None}))
    with pytest.raises(RequestError, match="fence 5"):
        await daemons.stop(TARGET, fence=4)
    assert (await daemons.get(TARGET)).held_percent() == 25


async def test_a_wedge_is_found_by_a_probe_and_repaired_with_limits_read_back(
    daemons: MpsDaemons, driver: GpuDriver
) -> None:
    daemon = await daemons.ensure(TARGET, fence=1, limits=LIMITS)
    load = driver.load(CUDA_MPS_PIPE_DIRECTORY=daemon.pipes)
    [server] = (await clients(daemons, 1)).servers
    daemons.node.probe_s = PATIENT_S
    await daemons.probe(TARGET)
    daemons.node.probe_s = PROBE_S
    control(daemons).fail(wedged=[server.pid])

    with pytest.raises(WedgedError, match="a new client hung for 5 s"):
        await daemons.probe(TARGET)
    done = await daemons.repair(TARGET)

    assert "ended the work of 2 processes" in done  # the probe that hung is one
    assert "read its limits back" in done
    assert load.do("alloc 1m") == "error 810"
    daemons.node.probe_s = PATIENT_S
    await daemons.probe(TARGET)
    assert (await daemons.get(TARGET)).held_mib(GPU) == 2048


async def test_ending_a_client_that_does_not_return_counts_as_a_wedge(
    daemons: MpsDaemons, driver: GpuDriver
) -> None:
    daemon = await daemons.ensure(TARGET, fence=1, limits=LIMITS)
    load = driver.load(CUDA_MPS_PIPE_DIRECTORY=daemon.pipes)
    await clients(daemons, 1)
    control(daemons).fail(terminate_hangs=True)

    with pytest.raises(WedgedError, match="did not return within 5 s"):
        await daemons.terminate(TARGET, [load.pid])
    control(daemons).fail()
    await daemons.terminate(TARGET, [load.pid, 4_194_303])
    assert load.do("alloc 1m") == "error 810"


async def test_a_partitioner_without_a_directory_refuses_and_one_with_it_serves(
    daemons: MpsDaemons, driver: GpuDriver
) -> None:
    path = daemons.node.root / "p.sock"
    remote = RemoteMpsDaemons(path)
    with pytest.raises(UnavailableError, match="no partitioner responds"):
        await remote.missing_reason()
    gpus: object = None
    async with PartitionServer(gpus, agent_uid=os.geteuid()).serve(path):  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="--mps-dir"):
            await remote.missing_reason()
    runners = MpsRunners(daemons, SharedServers(daemons.node))
    server = PartitionServer(gpus, agent_uid=os.geteuid(), mps=runners)  # type: ignore[arg-type]
    async with server.serve(path):
        assert await remote.missing_reason() == ""
        daemon = await remote.ensure(TARGET, fence=1, limits=LIMITS)
        load = driver.load(CUDA_MPS_PIPE_DIRECTORY=daemon.pipes)
        [server_of_load] = (await clients(daemons, 1)).servers
        await remote.terminate(TARGET, [load.pid])
        control(daemons).fail(wedged=[server_of_load.pid])
        with pytest.raises(WedgedError):
            await remote.probe(TARGET)
        assert "started it again" in await remote.repair(TARGET)
        [started] = await remote.list()
        await remote.stop(started.target, fence=started.fence)
        assert (await remote.get(TARGET)).problem
