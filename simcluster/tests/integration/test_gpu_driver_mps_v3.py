"""MPS of the simulated GPUs in version 3 of its protocol: servers and namespaces with names."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from simcluster.gpu_driver.mps_service import PID_FILE
from tests.support.gpu_driver import GpuDriver, GpuLoad, gpu
from tests.support.mps import ControlDaemon
from tests.support.waiting import until_blocking

ONE, TWO = gpu(1), gpu(2)
CSV = "--format=csv,noheader"
GIB = 1 << 30


@pytest.fixture
def daemon(driver: GpuDriver, tmp_path: Path) -> Iterator[ControlDaemon]:
    driver.create(ONE, TWO)
    made = ControlDaemon(pipes=tmp_path / "p", logs=tmp_path / "l")
    made.start("-p", "3", "-m", CUDA_VISIBLE_DEVICES=f"{ONE.uuid},{TWO.uuid}")
    yield made
    made.close()


def done(daemon: ControlDaemon, *lines: str) -> str:
    """Carry out commands that succeed; return the output of the last."""
    output = ""
    for line in lines:
        code, output = daemon.ask(line)
        assert code == 0, output
    return output


def refused(daemon: ControlDaemon, line: str, *, through: str = "") -> str:
    code, output = daemon.ask(line, through=through)
    assert code == 1
    assert output.count("\n") == 1
    return output


def client(driver: GpuDriver, daemon: ControlDaemon, place: str) -> GpuLoad:
    return driver.load(CUDA_MPS_PIPE_DIRECTORY=str(daemon.pipes / place))


def granted(daemon: ControlDaemon, place: str) -> list[str]:
    """Return what a client at a socket gets: its percentage and its memory by GPU."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(daemon.pipes / place / "control"))
        connection.sendall(b"client 1\n")
        return connection.makefile().readline().split()[2:]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def pid_of(daemon: ControlDaemon, server: str) -> int:
    return int(done(daemon, f"server get {server} pid"))


def test_a_daemon_of_version_3_takes_arguments_and_leaves_nothing_when_it_quits(
    tmp_path: Path,
) -> None:
    daemon = ControlDaemon(pipes=tmp_path / "p", logs=tmp_path / "l")

    started = daemon.start("--protocol", "2", "--multiuser", CUDA_MPS_PROTOCOL_VERSION="3")
    created = daemon.run("-p", "2", "server", "create", "gpu0")
    listed = daemon.run("server", "list", CSV)

    assert started.stdout.endswith(f"set CUDA_MPS_PIPE_DIRECTORY={daemon.pipes}\n")
    assert (created.returncode, created.stdout) == (0, "")
    pid = pid_of(daemon, "gpu0")
    assert listed.stdout == f"gpu0,0,{pid},Ready,{daemon.pipes}/gpu0,-,-\n"
    assert "already running" in daemon.start().stderr
    by_lines = daemon.run(stdin="get_server_list\n")
    assert (by_lines.returncode, by_lines.stdout.count("\n")) == (1, 1)
    assert daemon.run("-q").returncode == 0
    until_blocking(lambda: not list(daemon.pipes.iterdir()))
    assert not Path(f"/proc/{pid}").exists()
    assert daemon.run("server", "list").returncode == 1


def test_a_daemon_of_version_2_takes_no_arguments(tmp_path: Path) -> None:
    daemon = ControlDaemon(pipes=tmp_path / "p", logs=tmp_path / "l")

    daemon.start("-p", "3", CUDA_MPS_PROTOCOL_VERSION="2")
    words = daemon.run("-p", "3", "server", "list")

    assert words.returncode == 1
    assert "protocol 2" in words.stdout
    assert daemon.start("-p", "4").returncode == 1
    assert daemon.start("--fast").returncode == 1
    assert daemon.run("-q").returncode == 0
    until_blocking(lambda: not (daemon.pipes / "control").exists())


def test_clients_have_the_limits_of_the_namespace_whose_socket_they_use(
    driver: GpuDriver, daemon: ControlDaemon
) -> None:
    done(
        daemon,
        f"server create gpu0 --uid=0 --allowed-devices={ONE.uuid}",
        "server set gpu0 --pinned-memory-limit=1G --active-thread-percentage=5",
        "namespace create small --server=gpu0",
        "namespace set small --server=gpu0 --pinned-memory-limit=2G",
        "namespace set small --server=gpu0 --active-thread-percentage=25",
        "namespace create free --server=gpu0",
        "server create both --allowed-devices=0,1",
        "server set both --pinned-memory-limit=512M",
    )
    load = client(driver, daemon, "gpu0/small")

    assert not load.fits("2g")
    assert load.fits("1g")
    assert granted(daemon, "gpu0/small") == ["25", f"{ONE.uuid}={2 * GIB}"]
    assert granted(daemon, "gpu0") == ["5", f"{ONE.uuid}={GIB}"]
    assert granted(daemon, "gpu0/default") == ["5", f"{ONE.uuid}={GIB}"]
    assert granted(daemon, "gpu0/free") == ["100"]
    half = GIB // 2
    assert granted(daemon, "both") == ["100", f"{ONE.uuid}={half},{TWO.uuid}={half}"]
    assert "uid_0" not in done(daemon, "server list")
    assert granted(daemon, "") == ["100"]
    assert done(daemon, "server get uid_0 status") == "Ready\n"


def test_a_limit_of_a_server_with_all_gpus_of_a_node_holds_on_each(
    driver: GpuDriver, tmp_path: Path
) -> None:
    driver.create(ONE)
    daemon = ControlDaemon(pipes=tmp_path / "p", logs=tmp_path / "l")
    daemon.start("-p", "3", "-m")
    done(daemon, "server create all", "server set all --pinned-memory-limit=1G")

    load = client(driver, daemon, "all")

    assert not load.fits("1g")
    assert load.fits("512m")
    daemon.close()


def test_without_multi_user_mode_only_the_owner_of_a_server_is_its_client(tmp_path: Path) -> None:
    daemon = ControlDaemon(pipes=tmp_path / "p", logs=tmp_path / "l")
    daemon.start("-p", "3")
    done(daemon, "server create own", "server create --uid=65534")

    assert granted(daemon, "own") == ["100"]
    assert granted(daemon, "uid_65534") == []  # refused
    done(daemon, "server set uid_65534 --uid=0")
    assert granted(daemon, "uid_65534") == ["100"]
    daemon.close()


def test_lists_and_single_fields_show_what_is_set_and_a_dash_for_what_is_not(
    daemon: ControlDaemon,
) -> None:
    place = f"{daemon.pipes}/gpu0"
    done(
        daemon,
        f"server create gpu0 --allowed-devices={ONE.uuid}",
        "namespace create a --server=gpu0",
        "namespace set a --server=gpu0 --pinned-memory-limit=4G --active-thread-percentage=25",
        "server create --uid=0",
    )

    assert done(daemon, f"server list gpu0 {CSV}").split(",")[5:] == [ONE.uuid, "-\n"]
    assert done(daemon, f"namespace list --server=gpu0 {CSV}") == (
        f"default,gpu0,Ready,-,-,-,{place}/default\na,gpu0,Ready,4G,25,-,{place}/a\n"
    )
    assert done(daemon, f"namespace list a {CSV}") == f"a,gpu0,Ready,4G,25,-,{place}/a\n"
    assert done(daemon, "namespace list --format=csv").splitlines()[-1] == (
        f"default,uid_0,Ready,-,-,-,{daemon.pipes}/uid_0/default"
    )
    assert done(daemon, "namespace get a gpu0 pinned-memory-limit") == "4G\n"
    assert done(daemon, "namespace get a gpu0 active-thread-percentage") == "25\n"
    assert done(daemon, "namespace get default gpu0 pinned-memory-limit") == "-\n"
    assert done(daemon, "server get gpu0 pipe-directory") == f"{place}\n"
    assert "unknown field" in refused(daemon, "namespace get a gpu0 memory")


def test_what_is_there_twice_or_not_at_all_is_refused(daemon: ControlDaemon) -> None:
    done(daemon, "server create gpu0", "namespace create a --server=gpu0")

    assert "exists" in refused(daemon, "server create gpu0")
    assert "exists" in refused(daemon, "namespace create a --server=gpu0")
    assert "cannot be deleted" in refused(daemon, "namespace delete default --server=gpu0")
    for missing in (
        "server delete gpu1",
        "namespace create a --server=gpu1",
        "namespace set b --server=gpu0 --client-priority=1",
        "namespace get b gpu0 name",
        "namespace list b",
        "client list --server=gpu1",
        "client get 1 cmd",
        "client terminate x",
    ):
        assert "no " in refused(daemon, missing)
    assert "a name or --uid" in refused(daemon, "server create")
    assert "multiuser" in refused(daemon, "server create gpu1 --uid=1000")
    assert "File exists" in refused(daemon, "server create control")
    longest = f"{'n' * 64} --server=gpu0"
    too_long = len(f"{daemon.pipes}/gpu0/{'n' * 64}/control") > 107
    assert too_long == ("too long" in daemon.ask(f"namespace create {longest}")[1])
    assert (
        done(daemon, "namespace delete a --server=gpu0", f"namespace list {CSV}").count("\n") == 1
    )


def test_limits_and_names_stay_while_clients_are_attached_unless_these_are_ended(
    driver: GpuDriver, daemon: ControlDaemon
) -> None:
    done(daemon, "server create gpu0", "namespace create a --server=gpu0")
    first, second, other = (client(driver, daemon, f"gpu0/{name}") for name in ("a", "a", ""))

    attached = "has active clients"
    assert attached in refused(daemon, "namespace set a --server=gpu0 --client-priority=1")
    assert attached in refused(daemon, "server set gpu0 --client-priority=1")
    assert attached in refused(daemon, "namespace delete a --server=gpu0")
    assert attached in refused(daemon, "server delete gpu0")
    done(daemon, f"client terminate {first.pid}")
    assert first.do("alloc 1m") == "error 810"  # CUDA_ERROR_MPS_CLIENT_TERMINATED
    assert second.fits("1m")
    done(daemon, "namespace delete a --server=gpu0 --force")
    assert second.do("alloc 1m") == "error 810"
    assert not (daemon.pipes / "gpu0" / "a").exists()
    other.kill()
    until_blocking(lambda: daemon.ask(f"client list {CSV}") == (0, ""))
    done(daemon, "server set gpu0 --client-priority=1", "server delete gpu0")
    assert not (daemon.pipes / "gpu0").exists()


def test_clients_are_listed_with_their_command_lines_as_they_are(
    driver: GpuDriver, daemon: ControlDaemon
) -> None:
    done(daemon, "server create gpu0 --allowed-devices=0", "namespace create a --server=gpu0")
    odd = ("bash", "-c", f"exec -a $'a,b\\nc' '{driver.folder}/gpu-load'")
    load = driver.load(*odd, CUDA_MPS_PIPE_DIRECTORY=str(daemon.pipes / "gpu0" / "a"))

    assert done(daemon, f"client list --server=gpu0 {CSV}") == f"{load.pid},gpu0,0,a,a,b\nc\n"
    assert done(daemon, "client list --all").splitlines()[0].split() == [
        *("PID", "SERVER", "DEVICE", "MAWS-NS", "CMD")
    ]
    assert done(daemon, f"client get {load.pid} maws-ns") == "a\n"
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    assert done(daemon, f"client get {load.pid} linux-ns") == f"{namespace}\n"


def test_a_server_that_is_killed_or_has_no_gpu_vanishes_with_its_namespaces(
    driver: GpuDriver, daemon: ControlDaemon
) -> None:
    daemon.fail(missing=[TWO.uuid])
    done(daemon, f"server create lost --allowed-devices={TWO.uuid}")
    done(daemon, "server create none --allowed-devices=2")
    done(daemon, "server create gpu0", "namespace create a --server=gpu0")
    load = client(driver, daemon, "gpu0/a")
    os.kill(pid_of(daemon, "gpu0"), signal.SIGKILL)

    until_blocking(lambda: daemon.ask(f"server list {CSV}") == (0, ""))
    assert load.do("alloc 1m") == "error 810"
    until_blocking(lambda: names(daemon.pipes) == ["control", PID_FILE])
    done(daemon, "server create gpu0")
    assert "no namespace" in refused(daemon, "namespace get a gpu0 name")


def test_a_new_daemon_knows_nothing_of_one_that_was_killed(daemon: ControlDaemon) -> None:
    done(daemon, "server create gpu0", "namespace create a --server=gpu0")
    (daemon.pipes / "gpu0" / "notes").touch()
    other = daemon.pipes / "other"
    other.mkdir()
    os.kill(int((daemon.pipes / PID_FILE).read_text()), signal.SIGKILL)
    until_blocking(lambda: daemon.ask("server list")[0] == 1)

    daemon.start("-p", "3", "-m")

    assert done(daemon, f"namespace list {CSV}") == ""
    assert names(daemon.pipes / "gpu0") == ["notes"]  # no file of others is removed
    assert other.is_dir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_other_users_read_everything_through_their_socket_and_change_nothing(
    daemon: ControlDaemon,
) -> None:
    done(daemon, "server create gpu0", "namespace create a --server=gpu0")
    reads = ["server list", "namespace list", "client list --all", "server get gpu0 pid"]
    changes = [
        *("server create b", "server delete gpu0 --force", "server set gpu0 --client-priority=1"),
        *("namespace create b --server=gpu0", "namespace delete a --server=gpu0"),
        *("namespace set a --server=gpu0 --client-priority=1", "quit"),
    ]

    results = by_other_user(daemon.pipes / "gpu0" / "a", [*reads, *changes])

    for line, (code, output) in zip(reads, results, strict=False):
        assert (code, output) == daemon.ask(line)
    for line, (code, output) in zip(changes, results[len(reads) :], strict=True):
        title = " ".join(line.split()[:2]).upper()
        assert code == 1
        if line != "server create b":
            assert output == (
                f"Insufficient privileges for UID 65534. '{title}' requires server owner.\n"
            )
    assert done(daemon, f"namespace list {CSV}").count("\n") == 2


def by_other_user(directory: Path, lines: list[str]) -> list[tuple[int, str]]:
    """Send commands through a socket as a user who has no right to its path."""
    code = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from simcluster.gpu_driver.mps_control import send_words
os.setuid(65534)
replies = [send_words(".", line.split()) for line in sys.stdin]
print(json.dumps([(code, output.decode()) for code, output in replies]))
"""
    ran = subprocess.run(
        [sys.executable, "-c", code, Path(__file__).parents[3]],
        cwd=directory,
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return [(code, output) for code, output in json.loads(ran.stdout)]


def test_a_daemon_can_ignore_limits_hang_or_be_silent(
    driver: GpuDriver, daemon: ControlDaemon
) -> None:
    daemon.fail(ignores_limits=True)
    done(daemon, "server create gpu0", "server set gpu0 --pinned-memory-limit=1G")
    assert done(daemon, "namespace get default gpu0 pinned-memory-limit") == "-\n"
    load = client(driver, daemon, "gpu0")
    pid = pid_of(daemon, "gpu0")
    daemon.fail(terminate_hangs=True)
    assert hangs(daemon, "command\0client\0terminate\0" + str(load.pid))
    daemon.fail(silent=True)
    assert hangs(daemon, "protocol")
    daemon.fail(wedged=[pid])
    assert hangs(daemon, "client 1")
    assert done(daemon, "server get gpu0 status") == "Ready\n"
    assert load.fits("2g")


def hangs(daemon: ControlDaemon, line: str) -> bool:
    """Return whether a request has no reply within 0.5 s."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(daemon.pipes / "gpu0" / "control"))
        connection.sendall(f"{line}\n".encode())
        return not select.select([connection], [], [], 0.5)[0]
