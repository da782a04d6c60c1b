"""`leasehold up` with the real components: ready, inspected, killed, restarted, stopped."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from services.cli.state_dir import StateDir, load_state, supervisor_pid
from services.cli.up.down import leftovers
from tests.support.command_server import ROOT, call
from tests.support.waiting import until_blocking

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
UP = (sys.executable, "-P", "-m", "services.cli", "up")
"""Starts the components by the interpreter; `leasehold` forks them."""


def leasehold(
    *words: str, env: Mapping[str, str] = ENVIRONMENT, folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(words, *call(words, env, limit_s=120.0, folder=folder))


@pytest.fixture(scope="module")
def directory() -> Iterator[StateDir]:
    root = Path(tempfile.mkdtemp(prefix="lh-up-"))
    made = StateDir.at(root)
    yield made
    leasehold("down", "--state", str(root))
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def running(directory: StateDir) -> StateDir:
    """Everything up and ready; started only if the test before ended it."""
    if supervisor_pid(directory) is None:
        options = ("--headless", "--nodes", "1", "--gpus", "2xT4", "--placers", "1")
        started = subprocess.run(
            (*UP, "--state", str(directory.root), *options),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env=ENVIRONMENT,
        )
        assert started.returncode == 0, started.stdout + started.stderr
    until_blocking(lambda: _all_ready(directory), 60.0)
    return directory


def _all_ready(directory: StateDir) -> bool:
    """Whether the extender is ready, too, which starts after the others."""
    state = load_state(directory)
    return state is not None and all(component.ready for component in state.components)


def show(directory: StateDir, *command: str) -> Any:
    done = leasehold(*command, "--state", str(directory.root), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_headless_returns_when_every_component_is_ready(running: StateDir) -> None:
    state = load_state(running)

    assert state is not None
    assert state.ready
    assert {component.name for component in state.components if component.ready} == {
        *("nats", "valkey", "simcluster", "watcher", "placer-0", "planner", "binder"),
        *("timekeeper", "webhook", "api", "extender", "agent-node-0"),
    }


def test_the_devices_are_listed_and_the_audit_is_clean(running: StateDir) -> None:
    nodes = until_blocking(lambda: show(running, "gpus")["nodes"])

    assert [device["model"] for device in nodes[0]["devices"]] == ["Tesla T4"] * 2
    assert show(running, "audit")["clean"]
    shown = show(running, "ps")
    assert [shown[each] for each in ("leases", "waiting", "unmeasured_nodes")] == [[], [], []]


@pytest.mark.parametrize("command", [("up",), ("up", "--nodes", "1"), ("status",)])
def test_a_second_up_and_status_say_where_everything_is(
    running: StateDir, command: tuple[str, ...]
) -> None:
    second = leasehold(*command, "--state", str(running.root))

    assert second.returncode == 0, second.stdout + second.stderr
    state = load_state(running)
    assert state is not None
    number = len(state.components)
    ready = f"{number} of {number} components are ready"
    for text in (ready, "1 node with 2xT4", state.api_url):
        assert text in second.stdout
    assert f"export KUBECONFIG={running.kubeconfig}\n" in second.stdout


@pytest.mark.parametrize(
    "command", ["gpus", "ps", "top --once", "budget", "report", "audit", "status", "doctor"]
)
def test_elsewhere_the_kubeconfig_leads_every_command_to_the_stack(
    running: StateDir, tmp_path: Path, command: str
) -> None:
    environment = {**ENVIRONMENT, "KUBECONFIG": str(running.kubeconfig)}

    done = leasehold(*command.split(), env=environment, folder=tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr


def test_a_second_up_with_other_settings_reports_the_pid_of_the_first(running: StateDir) -> None:
    second = leasehold("up", "--state", str(running.root), "--nodes", "3")

    assert second.returncode == 1
    assert f"in use by process {supervisor_pid(running)}" in second.stderr


def test_status_names_what_is_not_ready(running: StateDir) -> None:
    state = load_state(running)
    assert state is not None
    (binder,) = (each for each in state.components if each.name == "binder")
    assert binder.pid is not None
    os.kill(binder.pid, signal.SIGSTOP)
    try:
        stopped = leasehold("status", "--state", str(running.root))
    finally:
        os.kill(binder.pid, signal.SIGCONT)

    assert stopped.returncode == 1
    assert "11 of 12 components are ready\n  binder: does not respond: timed out" in stopped.stdout
    until_blocking(lambda: not leasehold("status", "--state", str(running.root)).returncode)
    assert show(running, "status")["components"][-1]["ready"]


def test_every_service_that_is_killed_comes_back(running: StateDir) -> None:
    before = load_state(running)
    assert before is not None
    for component in before.components:
        if component.pid is not None:
            os.kill(component.pid, signal.SIGKILL)

    def all_back() -> bool:
        now = load_state(running)
        assert now is not None
        return all(component.ready and component.restarts for component in now.components)

    until_blocking(all_back, 60.0)

    assert until_blocking(lambda: show(running, "gpus")["nodes"])
    assert show(running, "audit")["clean"]


def test_kill_9_of_the_supervisor_leaves_nothing_and_another_up_takes_over_the_state(
    running: StateDir,
) -> None:
    pid = supervisor_pid(running)
    assert pid

    os.kill(pid, signal.SIGKILL)

    until_blocking(lambda: not leftovers(running))
    down = leasehold("ps", "--state", str(running.root))
    assert down.returncode == 3
    assert "nothing runs in" in down.stderr
    assert len(down.stderr.splitlines()) == 1
    again = leasehold("up", "--headless", "--state", str(running.root), "--placers", "1")
    assert again.returncode == 0, again.stdout + again.stderr
    state = load_state(running)
    assert state is not None
    assert state.nodes == {"node-0": "2xT4"}


def test_ctrl_c_ends_every_process(directory: StateDir) -> None:
    assert leasehold("down", "--state", str(directory.root)).returncode == 0
    up = subprocess.Popen(
        (*UP, "--state", str(directory.root), "--placers", "1"),
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    assert up.stdout is not None
    until_blocking(lambda: up.stdout and up.stdout.readline().startswith("ready in"), 60.0)

    up.send_signal(signal.SIGINT)
    output, _ = up.communicate(timeout=30)

    assert up.returncode == 0
    assert "nothing is left running" in output
    assert leftovers(directory) == []


def test_up_ends_with_the_log_of_a_server_that_cannot_start(tmp_path: Path) -> None:
    (tmp_path / "valkey").mkdir()
    (tmp_path / "valkey" / "appendonlydir").write_text("in the way of its file")

    failed = leasehold("up", "--state", str(tmp_path), "--placers", "1")

    assert failed.returncode == 1
    assert "valkey exited 4 times" in failed.stderr
    assert "append-only" in failed.stderr.lower()
    assert leftovers(StateDir.at(tmp_path)) == []


def test_status_says_that_nothing_runs(tmp_path: Path) -> None:
    for root, text in (
        (tmp_path, f"nothing runs in {tmp_path}"),
        (Path("/none"), "there is no /none"),
    ):
        done = leasehold("status", "--state", str(root))

        assert done.returncode == 1
        assert done.stdout.startswith(f"{text}: start it with `leasehold up --state {root}`")


def test_a_start_that_fails_in_the_background_has_a_last_sentence(tmp_path: Path) -> None:
    (tmp_path / "installation.json").mkdir()

    failed = leasehold("up", "--headless", "--state", str(tmp_path), "--placers", "1")

    assert failed.returncode == 1
    log = StateDir.at(tmp_path).log("supervisor")
    assert failed.stdout.splitlines()[-1] == (f"leasehold up: it did not start; {log} has more")
    assert "Is a directory" in log.read_text()
