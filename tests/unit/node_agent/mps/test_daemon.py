"""What control daemons of MPS print, what they hold at most, and when clients are ended."""

import os
import socket
import tempfile
import time
from pathlib import Path

import msgspec
import pytest

from services.node_agent.enforcers.mps import Mps
from services.node_agent.memory_limits.specification import check_variables
from services.node_agent.mps.control import MpsControl
from services.node_agent.mps.daemon import (
    MpsDaemon,
    MpsLimits,
    MpsServer,
    MpsTarget,
    check_limits,
    parse_memory_mib,
    parse_percent,
    parse_pids,
)
from services.node_agent.mps.daemon_directories import MpsNode
from services.node_agent.mps.daemons import MpsDaemons
from services.node_agent.mps.watch import drain_at
from shared.dialects.mps import daemon_name
from shared.model.errors import RequestError, UnavailableError
from shared.model.names import DeviceUuid, PodUid

GPU = DeviceUuid("GPU-1")


@pytest.mark.parametrize(
    ("reply", "mib"),
    [("1000M\n", 1000), ("3G", 3072), ("1073741824", 1024), ("1025K", 2), ("", None), ("1MB", 1)],
)
def test_amounts_of_memory_are_read_in_all_units(reply: str, mib: int | None) -> None:
    assert parse_memory_mib(reply) == mib


def test_percentages_and_pids_of_seven_digits_are_read() -> None:
    assert parse_percent("25.0\n") == 25
    assert parse_pids("4194303\n1\n") == (4_194_303, 1)
    assert parse_pids("") == ()


@pytest.mark.parametrize(
    "reply", ["Unrecognized command", "-1", "25%", "1,5", "1 2", "9" * 400, "9" * 5_000, "٢٥"]
)
def test_another_reply_is_refused_and_shown(reply: str) -> None:
    with pytest.raises(UnavailableError, match="MPS replied"):
        parse_percent(reply)
    with pytest.raises(UnavailableError, match="MPS replied"):
        parse_memory_mib(reply)
    with pytest.raises(UnavailableError, match="MPS replied"):
        parse_pids(f"{reply} x")


def test_a_list_of_pids_has_a_bound() -> None:
    """A container can listen where its daemon did."""
    with pytest.raises(UnavailableError, match="is no list of PIDs"):
        parse_pids("1\n" * 2_000)
    with pytest.raises(UnavailableError, match="is no list of PIDs"):
        parse_pids("9" * 5_000)


def test_the_largest_limit_of_a_daemon_and_its_servers_counts() -> None:
    server = MpsServer(pid=1, status="ACTIVE", percent=40.5, memory_mib={GPU: 100})
    daemon = MpsDaemon(pipes="/p", pid=2, percent=25, memory_mib={GPU: 200}, servers=(server,))
    unlimited = MpsServer(pid=1, status="ACTIVE", percent=100, memory_mib={GPU: None})

    assert (daemon.held_percent(), daemon.held_mib(GPU)) == (41, 200)
    lost = MpsDaemon(pipes="/p", pid=2, percent=25, memory_mib={GPU: 9}, servers=(unlimited,))
    assert (lost.held_percent(), lost.held_mib(GPU)) == (100, None)


@pytest.mark.parametrize(
    "limits",
    [
        MpsLimits(percent=0, memory_mib={GPU: 1}),
        MpsLimits(percent=101, memory_mib={GPU: 1}),
        MpsLimits(percent=1, memory_mib={GPU: 0}),
        MpsLimits(percent=1, memory_mib={}),
        MpsLimits(percent=1, memory_mib={DeviceUuid("GPU-1 1G\nquit"): 1}),
    ],
)
def test_what_cannot_be_a_part_of_a_command_is_refused(limits: MpsLimits) -> None:
    with pytest.raises(RequestError, match="MPS limits"):
        check_limits(limits)


@pytest.mark.parametrize(
    ("grace_s", "earliest_s", "latest_s"),
    [(30, 27, 29), (5, 2.5, 4), (1, 0, 0), (0, 0, 0), (3600, 3597, 3599)],
)
def test_clients_are_ended_shortly_before_the_kill_and_never_in_the_first_half_of_the_grace_period(
    grace_s: float, earliest_s: float, latest_s: float
) -> None:
    moment = drain_at(1000 + grace_s, 1000) - 1000

    assert earliest_s <= moment <= latest_s
    assert grace_s <= 1 or moment >= grace_s / 2


def test_variables_of_mps_that_the_agent_did_not_set_are_refused_before_the_start() -> None:
    given = {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps", "A": "1"}
    check_variables(dict(given), (), given)

    for changed in ({"CUDA_MPS_PIPE_DIRECTORY": "/x"}, {"CUDA_MPS_SM_PARTITION": "1"}):
        with pytest.raises(RequestError, match="CUDA_MPS_"):
            check_variables(given | changed, (), given)


@pytest.mark.parametrize(("started_s_ago", "is_ended"), [(0, False), (100, True), (-3600, True)])
async def test_a_daemon_of_an_ended_pod_goes_after_a_while_also_if_the_clock_was_set_back(
    started_s_ago: float, is_ended: bool, tmp_path: Path
) -> None:
    target = MpsTarget(PodUid("p"), "main")
    record = {
        "target": target,
        "fence": 1,
        "limits": {"percent": 10, "memory_mib": {}},
        "started_at": time.time() - started_s_ago,
    }
    directory = tmp_path / daemon_name(target.holder, target.container)
    directory.mkdir()
    (directory / "daemon.json").write_bytes(msgspec.json.encode(record))

    node = MpsNode(tmp_path, program=("false",), proc=tmp_path)
    await Mps(MpsDaemons(node)).end(set(), None)

    assert directory.exists() is not is_ended


def test_a_link_that_a_container_makes_after_the_look_leads_to_no_other_daemon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(prefix="lh-") as folder:
        control = MpsControl(Path(folder), ("false",), Path(folder))
        control.pipes.mkdir()
        other = Path(folder) / "other"
        listeners = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        for listener, path in zip(listeners, (control.socket, other), strict=True):
            listener.bind(str(path))
            listener.listen()
            listener.setblocking(False)
        connect = socket.socket.connect

        def swap_and_connect(self: socket.socket, path: str) -> None:
            control.socket.unlink()
            control.socket.symlink_to(other)
            connect(self, path)

        monkeypatch.setattr(socket.socket, "connect", swap_and_connect)

        assert control.listener() == os.getpid()
        listeners[0].accept()[0].close()
        with pytest.raises(BlockingIOError):
            listeners[1].accept()
        assert control.listener() == 0, "a link itself refuses"
        for listener in listeners:
            listener.close()
