"""Servers of MPS that containers share: a namespace each, with its limits, and nothing believed."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.node_agent.mps.control import PROBE, PROBE_S
from services.node_agent.mps.daemon import MpsDaemon, MpsLimits, MpsTarget, WedgedError
from services.node_agent.mps.daemon_directories import MpsNode
from services.node_agent.mps.remote_daemons import RemoteMpsDaemons
from services.node_agent.mps.runners import MpsRunners
from services.node_agent.mps.shared_servers import NOT_RUNNING, SharedServers
from services.node_agent.partition.partition_server import PartitionServer
from shared.dialects.mps import SERVER, daemon_name, shared_daemon_name
from shared.model.errors import RequestError, UnavailableError
from shared.model.names import DeviceUuid, PodUid
from simcluster.gpu_driver.mps_control import command
from tests.support.gpu_driver import GpuDriver, GpuLoad, gpu
from tests.support.mps import ControlDaemon
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only user 0 may own such a server")
ONE = gpu(1)
GPU = DeviceUuid(ONE.uuid)
FIRST = MpsTarget(PodUid("pod-1"), "main", GPU)
SECOND = MpsTarget(PodUid("pod-2"), "main", GPU)
PATIENT_S = 25.0
"""Time limit of a probe that succeeds, on a busy machine."""


def limits(percent: int, mib: int) -> MpsLimits:
    return MpsLimits(percent=percent, memory_mib={GPU: mib})


@pytest.fixture
async def servers(driver: GpuDriver) -> AsyncIterator[SharedServers]:
    driver.create(ONE)
    root = Path(tempfile.mkdtemp(prefix="lh-mps-"))
    variables = [f"{name}={value}" for name, value in driver.environment.items()]
    made = SharedServers(
        MpsNode(root, program=command(), probe_program=("env", *variables, *PROBE))
    )
    yield made
    driver.close()
    fail(made)
    for started in await made.list():
        await until_stopped(made, started.target, started.fence)
    shutil.rmtree(root)


async def until_stopped(servers: SharedServers, target: MpsTarget, fence: int) -> None:
    """Remove a namespace once its last client has ended."""

    async def stopped() -> bool:
        try:
            await servers.stop(target, fence=fence)
        except UnavailableError:
            return False
        return True

    await until(stopped)


def control(servers: SharedServers) -> ControlDaemon:
    directory = servers.node.root / shared_daemon_name(GPU)
    return ControlDaemon(pipes=directory / "pipe", logs=directory / "log")


def fail(servers: SharedServers, **faults: object) -> None:
    if (servers.node.root / shared_daemon_name(GPU)).exists():
        control(servers).fail(**faults)


def call(servers: SharedServers, *words: str) -> str:
    """Have the daemon carry out a command, as user 0 of the node."""
    done = subprocess.run(
        [*command(), *words],
        env=control(servers).environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()


async def clients(servers: SharedServers, target: MpsTarget, *pids: int) -> MpsDaemon:
    async def attached() -> MpsDaemon | None:
        daemon = await servers.get(target)
        return daemon if daemon.clients == set(pids) else None

    daemon = await until(attached)
    assert isinstance(daemon, MpsDaemon)
    return daemon


def program(driver: GpuDriver, daemon: MpsDaemon) -> GpuLoad:
    return driver.load(CUDA_MPS_PIPE_DIRECTORY=daemon.pipes)


async def test_containers_of_a_gpu_share_a_server_and_have_limits_of_their_own(
    servers: SharedServers, driver: GpuDriver
) -> None:
    assert await servers.missing_reason() == ""

    first = await servers.ensure(FIRST, fence=1, limits=limits(25, 2048))
    second = await servers.ensure(SECOND, fence=2, limits=limits(50, 4096))

    assert (first.held_percent(), first.held_mib(GPU)) == (25, 2048)
    assert (second.held_percent(), second.held_mib(GPU)) == (50, 4096)
    assert first.pid == second.pid
    assert [server.pid for server in first.servers] == [server.pid for server in second.servers]
    one = program(driver, first)
    two = program(driver, second)
    assert not one.fits("2g")
    assert two.fits("2g")
    await clients(servers, FIRST, one.pid)
    await clients(servers, SECOND, two.pid)
    assert {started.target for started in await servers.list()} == {FIRST, SECOND}


async def test_the_directory_of_a_container_has_only_its_own_socket(
    servers: SharedServers,
) -> None:
    first = await servers.ensure(FIRST, fence=1, limits=limits(25, 2048))
    second = await servers.ensure(SECOND, fence=2, limits=limits(50, 4096))

    assert first.pipes.endswith(f"/pipe/{SERVER}/{daemon_name(FIRST.holder, FIRST.container)}")
    for daemon in (first, second):
        assert [path.name for path in Path(daemon.pipes).iterdir()] == ["control"]


async def test_who_comes_without_a_namespace_gets_next_to_nothing(servers: SharedServers) -> None:
    await servers.ensure(FIRST, fence=1, limits=limits(25, 2048))

    assert call(servers, "namespace", "get", "default", SERVER, "active-thread-percentage") == "1"
    assert call(servers, "namespace", "get", "default", SERVER, "pinned-memory-limit") == "1M"


async def test_limits_that_somebody_changed_are_seen_and_set_again(servers: SharedServers) -> None:
    await servers.ensure(FIRST, fence=1, limits=limits(25, 2048))
    name = daemon_name(FIRST.holder, FIRST.container)
    call(servers, "namespace", "set", name, f"--server={SERVER}", "--active-thread-percentage=80")

    changed = await servers.get(FIRST)
    again = await servers.ensure(FIRST, fence=1, limits=limits(25, 2048))

    assert changed.held_percent() == 80
    assert again.held_percent() == 25


async def test_a_namespace_whose_limits_are_not_set_is_refused(servers: SharedServers) -> None:
    await servers.ensure(FIRST, fence=1, limits=limits(25, 2048))
    fail(servers, ignores_limits=True)

    with pytest.raises(UnavailableError, match="after 50 % of the threads and 4096 MiB"):
        await servers.ensure(SECOND, fence=2, limits=limits(50, 4096))

    fail(servers)
    daemon = await servers.ensure(SECOND, fence=2, limits=limits(50, 4096))
    assert daemon.held_percent() == 50


@pytest.mark.parametrize("killed", ["daemon", "server"])
async def test_what_was_killed_is_started_again_with_all_namespaces(
    servers: SharedServers, killed: str
) -> None:
    first = await servers.ensure(FIRST, fence=1, limits=limits(25, 2048))
    await servers.ensure(SECOND, fence=2, limits=limits(50, 4096))
    os.kill(first.pid if killed == "daemon" else first.servers[0].pid, signal.SIGKILL)

    async def gone() -> bool:
        return (await servers.get(SECOND)).problem == NOT_RUNNING

    await until(gone)
    await servers.ensure(FIRST, fence=1, limits=limits(25, 2048))

    second = await servers.get(SECOND)
    assert (second.held_percent(), second.held_mib(GPU)) == (50, 4096)


async def test_an_older_fence_changes_nothing_and_a_namespace_is_of_one_gpu(
    servers: SharedServers,
) -> None:
    await servers.ensure(FIRST, fence=5, limits=limits(25, 2048))

    with pytest.raises(RequestError, match="fence 5"):
        await servers.ensure(FIRST, fence=4, limits=limits(100, 2048))
    with pytest.raises(RequestError, match="fence 5"):
        await servers.stop(FIRST, fence=4)
    with pytest.raises(RequestError, match="limits one GPU"):
        await servers.ensure(
            SECOND, fence=6, limits=MpsLimits(percent=5, memory_mib={DeviceUuid("GPU-x"): 1})
        )
    for call_of_unknown in (servers.repair(SECOND), servers.probe(SECOND)):
        with pytest.raises(RequestError, match="has no namespace of MPS"):
            await call_of_unknown
    assert (await servers.get(FIRST)).held_percent() == 25


async def test_a_namespace_goes_when_its_last_client_has_and_the_server_with_the_last(
    servers: SharedServers, driver: GpuDriver
) -> None:
    first = await servers.ensure(FIRST, fence=1, limits=limits(25, 2048))
    second = await servers.ensure(SECOND, fence=2, limits=limits(50, 4096))
    load = program(driver, first)
    await clients(servers, FIRST, load.pid)

    with pytest.raises(UnavailableError, match="namespace delete"):
        await servers.stop(FIRST, fence=1)

    assert len(await servers.list()) == 2, "it is not forgotten"
    load.kill()
    await until_stopped(servers, FIRST, 1)
    assert not Path(first.pipes).exists()
    assert Path(second.pipes).exists()
    await servers.stop(SECOND, fence=2)
    assert not await servers.list()
    assert not (servers.node.root / shared_daemon_name(GPU)).exists()


async def test_a_server_that_does_not_open_its_gpu_is_ended_and_refused(
    servers: SharedServers,
) -> None:
    servers.ready_s = 0.5
    directory = servers.node.root / shared_daemon_name(GPU)
    directory.mkdir(parents=True)
    fail(servers, missing=[GPU])

    with pytest.raises(UnavailableError, match=r"is missing 0\.5 s after its start"):
        await servers.ensure(FIRST, fence=1, limits=limits(25, 2048))

    assert (await servers.get(FIRST)).problem == NOT_RUNNING
    fail(servers)
    assert (await servers.ensure(FIRST, fence=1, limits=limits(25, 2048))).held_percent() == 25


def report_status_by(servers: SharedServers, status: str) -> None:
    script = servers.node.root / "control"
    script.write_text(
        f'#!/bin/sh\n[ "$4" = status ] && {status} || exec {" ".join(command())} "$@"\n'
    )
    script.chmod(0o755)
    servers.node.program = (str(script),)


async def test_a_server_that_cannot_be_seen_is_ended_once_all_its_containers_have(
    servers: SharedServers,
) -> None:
    await servers.ensure(FIRST, fence=1, limits=limits(25, 2048))
    await servers.ensure(SECOND, fence=2, limits=limits(50, 4096))
    report_status_by(servers, "exec yes")

    with pytest.raises(UnavailableError, match="prints more than"):
        await servers.stop(FIRST, fence=1)

    assert len(await servers.list()) == 2, "it may still be used"
    await servers.stop(SECOND, fence=2)
    assert not await servers.list()
    assert not (servers.node.root / shared_daemon_name(GPU)).exists()


@pytest.mark.parametrize(
    ("status", "refusal"),
    [
        pytest.param("echo Fault", "is 'Fault'", id="it ends clients after a fault"),
        pytest.param("exec yes", "prints more than", id="it cannot be seen"),
    ],
)
async def test_a_server_in_doubt_gets_no_container_and_is_neither_ended_nor_started_anew(
    servers: SharedServers, driver: GpuDriver, status: str, refusal: str
) -> None:
    first = await servers.ensure(FIRST, fence=1, limits=limits(25, 2048))
    load = program(driver, first)
    await clients(servers, FIRST, load.pid)
    report_status_by(servers, status)

    with pytest.raises(UnavailableError, match=refusal):
        await servers.ensure(SECOND, fence=2, limits=limits(50, 4096))

    servers.node.program = command()
    assert load.fits("1m")
    assert (await servers.ensure(SECOND, fence=2, limits=limits(50, 4096))).pid == first.pid


FORGER = """
import ctypes, os, sys, time
rows = sys.argv[1]
if sys.argv[2:]:
    ctypes.CDLL("libcuda.so.1").cuInit(0)
    print(os.getpid(), flush=True)
    time.sleep(600)
"""


async def test_rows_that_a_program_adds_by_its_command_line_are_not_believed(
    servers: SharedServers, driver: GpuDriver
) -> None:
    first = await servers.ensure(FIRST, fence=1, limits=limits(25, 2048))
    second = await servers.ensure(SECOND, fence=2, limits=limits(50, 4096))
    name = daemon_name(FIRST.holder, FIRST.container)
    rows = "".join(f"\n{pid},{SERVER},0,{name},x, y" for pid in (os.getpid(), 4_194_303))
    forger = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", FORGER, rows, "run"),
        env=driver.environment | {"CUDA_MPS_PIPE_DIRECTORY": second.pipes},
        stdout=subprocess.PIPE,
    )
    try:
        assert forger.stdout is not None
        await forger.stdout.readline()
        load = program(driver, first)

        await clients(servers, FIRST, load.pid)
        await clients(servers, SECOND, forger.pid)
        assert f"{os.getpid()},{SERVER},0,{name}," in call(
            servers, "client", "list", "--format=csv,noheader"
        )
    finally:
        forger.kill()
        await forger.wait()


async def test_a_wedge_is_found_by_a_probe_and_repaired_for_all_containers_of_the_gpu(
    servers: SharedServers, driver: GpuDriver
) -> None:
    first = await servers.ensure(FIRST, fence=1, limits=limits(25, 2048))
    await servers.ensure(SECOND, fence=2, limits=limits(50, 4096))
    load = program(driver, first)
    [server] = (await clients(servers, FIRST, load.pid)).servers
    servers.node.probe_s = PATIENT_S
    await servers.probe(SECOND)
    servers.node.probe_s = PROBE_S
    fail(servers, wedged=[server.pid])

    with pytest.raises(WedgedError, match="a new client hung for 5 s"):
        await servers.probe(SECOND)
    done = await servers.repair(SECOND)

    assert "with 2 namespaces, and read their limits back" in done
    assert load.do("alloc 1m") == "error 810"
    servers.node.probe_s = PATIENT_S
    await servers.probe(FIRST)
    assert (await servers.get(FIRST)).held_mib(GPU) == 2048
    assert (await servers.get(SECOND)).held_mib(GPU) == 4096


async def test_only_a_containers_own_clients_are_ended(
    servers: SharedServers, driver: GpuDriver
) -> None:
    first = await servers.ensure(FIRST, fence=1, limits=limits(25, 2048))
    second = await servers.ensure(SECOND, fence=2, limits=limits(50, 4096))
    one = program(driver, first)
    two = program(driver, second)
    await clients(servers, FIRST, one.pid)
    await clients(servers, SECOND, two.pid)

    await servers.terminate(FIRST, [one.pid, two.pid])

    assert one.do("alloc 1m") == "error 810"
    assert two.fits("1m")
    fail(servers, terminate_hangs=True)
    with pytest.raises(WedgedError, match="did not return within 5 s"):
        await servers.terminate(SECOND, [two.pid])


async def test_a_partitioner_serves_both_forms(servers: SharedServers) -> None:
    path = servers.node.root / "p.sock"
    gpus: object = None
    here = MpsRunners.of_node(servers.node)
    server = PartitionServer(gpus, agent_uid=os.geteuid(), mps=here)  # type: ignore[arg-type]
    async with server.serve(path):
        remote = RemoteMpsDaemons(path, shared=True)
        daemon = await remote.ensure(FIRST, fence=1, limits=limits(25, 2048))
        own = await RemoteMpsDaemons(path).ensure(
            MpsTarget(PodUid("pod-3"), "main"), fence=1, limits=limits(50, 1024)
        )

        assert (daemon.held_percent(), own.held_percent()) == (25, 50)
        assert [started.target for started in await remote.list()] == [FIRST]
        assert "with 1 namespaces" in await remote.repair(FIRST)
        [other] = await RemoteMpsDaemons(path).list()
        await RemoteMpsDaemons(path).stop(other.target, fence=other.fence)
        await remote.stop(FIRST, fence=1)
        assert (await remote.get(FIRST)).problem
