"""MPS of the simulated GPUs: a control daemon, and programs as its clients."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from simcluster.gpu_driver.mps_control import command
from tests.support.gpu_driver import GIB, MIB, GpuDriver, GpuLoad, gpu
from tests.support.mps import ControlDaemon
from tests.support.waiting import until_blocking

ONE = gpu(1)


@pytest.fixture
def daemon(driver: GpuDriver, tmp_path: Path) -> Iterator[ControlDaemon]:
    driver.create(ONE)
    made = ControlDaemon(pipes=tmp_path / "p", logs=tmp_path / "l")
    made.start(
        CUDA_VISIBLE_DEVICES=ONE.uuid,
        CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="25",
        CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=f"{ONE.uuid}=2048M",
    )
    yield made
    made.close()


def client(driver: GpuDriver, daemon: ControlDaemon) -> GpuLoad:
    return driver.load(CUDA_MPS_PIPE_DIRECTORY=str(daemon.pipes))


def test_each_client_has_the_limits_that_its_server_started_with(
    driver: GpuDriver, daemon: ControlDaemon
) -> None:
    first = client(driver, daemon)
    daemon.do("set_default_active_thread_percentage 90")
    daemon.do(f"set_default_device_pinned_mem_limit {ONE.uuid} 4096M")
    second = client(driver, daemon)

    assert daemon.do("get_default_active_thread_percentage") == "90.0"
    assert daemon.do(f"get_default_device_pinned_mem_limit {ONE.uuid}") == "4096M"
    [server] = daemon.servers
    assert daemon.clients == [first.pid, second.pid]
    assert daemon.do(f"get_active_thread_percentage {server}") == "25.0"
    assert daemon.do(f"get_device_pinned_mem_limit {server} {ONE.uuid}") == "2048M"
    for load in (first, second):  # together they have more than the limit
        assert not load.fits("2g")
        assert load.fits("1g")
    assert first.value("info", "total") == ONE.memory_mib * MIB
    assert first.value("info", "free") == 2 * GIB - GIB - 256 * MIB


def test_a_program_without_the_directory_of_a_daemon_has_the_whole_gpu(
    driver: GpuDriver, daemon: ControlDaemon, tmp_path: Path
) -> None:
    load = driver.load(CUDA_MPS_PIPE_DIRECTORY=str(tmp_path / "none"))

    assert load.fits("8g")
    assert not daemon.clients


def test_a_client_that_is_terminated_gets_an_error_and_one_that_ends_is_forgotten(
    driver: GpuDriver, daemon: ControlDaemon
) -> None:
    first, second = client(driver, daemon), client(driver, daemon)
    [server] = daemon.servers

    assert daemon.do(f"terminate_client {server} {first.pid}") == "0"
    assert first.do("alloc 1m") == "error 810"  # CUDA_ERROR_MPS_CLIENT_TERMINATED
    second.kill()
    until_blocking(lambda: not daemon.clients)
    os.kill(server, signal.SIGKILL)
    until_blocking(lambda: not daemon.servers)


def test_commands_of_a_wedged_server_reply_as_ever_and_its_new_clients_hang(
    driver: GpuDriver, daemon: ControlDaemon
) -> None:
    client(driver, daemon)
    [server] = daemon.servers
    daemon.fail(wedged=[server])
    probe = [driver.folder / "gpu-load"]
    environment = driver.environment | daemon.environment

    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(probe, env=environment, stdin=subprocess.DEVNULL, check=False, timeout=1)
    assert daemon.do(f"get_server_status {server}") == "ACTIVE"
    os.kill(server, signal.SIGKILL)
    until_blocking(lambda: not daemon.servers)
    ended = subprocess.run(
        probe,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=30,
    )
    assert ended.returncode == 0


def test_a_daemon_can_ignore_limits_and_forgets_them_when_it_starts_again(
    driver: GpuDriver, daemon: ControlDaemon
) -> None:
    daemon.fail(ignores_limits=True)
    daemon.do("set_default_active_thread_percentage 50")
    assert daemon.do("get_default_active_thread_percentage") == "25.0"
    daemon.close()
    daemon.start()

    assert daemon.do("get_default_active_thread_percentage") == "100.0"
    assert daemon.do(f"get_default_device_pinned_mem_limit {ONE.uuid}") == ""
    assert "already running" in daemon.start().stderr


def test_what_nvidia_refuses_is_refused(daemon: ControlDaemon, tmp_path: Path) -> None:
    long = ControlDaemon(pipes=tmp_path / ("p" * 107), logs=tmp_path / "l")

    assert long.start().returncode == 1
    assert "Unrecognized" in daemon.do("set_everything 1")
    assert "invalid" in daemon.do("set_default_active_thread_percentage 0")
    assert "invalid" in daemon.do("get_client_list 1")
    missing = subprocess.run(
        command(),
        env=long.environment,
        input="quit\n",
        text=True,
        capture_output=True,
        check=False,
        timeout=30,
    )
    assert missing.returncode == 1
    assert "Cannot find MPS control daemon" in missing.stdout
