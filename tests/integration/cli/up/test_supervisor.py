"""The supervisor with real processes: starts, restarts, stops, and leaves nothing behind."""

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.cli.local_commands import Down
from services.cli.state_dir import (
    AlreadyRunningError,
    ComponentState,
    StateDir,
    locked,
    supervisor_pid,
    wipe,
)
from services.cli.up.components import Component, RunFileCheck
from services.cli.up.down import down, kill_leftovers, leftovers
from services.cli.up.supervisor import RestartPolicy, StartError, SupervisionTiming, Supervisor
from shared.model.errors import RequestError
from tests.support.servers.supervised import STUBBORN, dummy
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[4]
QUICK = RestartPolicy(first_pause_s=0.01, max_pause_s=0.05)


@pytest.fixture
def directory(tmp_path: Path) -> StateDir:
    made = StateDir.at(tmp_path / "state")
    made.make()
    return made


class Watched:
    """A supervisor in this process, and what it reported and saved."""

    def __init__(
        self,
        directory: StateDir,
        components: list[Component],
        *,
        ready_s: float = 20.0,
        terminate_s: float = 5.0,
    ) -> None:
        self.reports: list[str] = []
        self.states: dict[str, ComponentState] = {}
        self.pids: dict[str, list[int]] = {}
        self.stop = asyncio.Event()
        self.ready = asyncio.Event()
        self.supervisor = Supervisor(
            components,
            directory,
            report=self.reports.append,
            save=self._save,
            policy=QUICK,
            timing=SupervisionTiming(ready_s=ready_s, terminate_s=terminate_s, progress_s=0.7),
        )

    def _save(self, states: tuple[ComponentState, ...], ready: bool) -> None:
        self.states = {state.name: state for state in states}
        for state in states:
            if state.pid is not None and state.pid not in self.pids.setdefault(state.name, []):
                self.pids[state.name].append(state.pid)

    async def run(self) -> None:
        await self.supervisor.run(self.stop, self.ready.set)


@contextlib.asynccontextmanager
async def running(
    directory: StateDir, *components: Component, terminate_s: float = 5.0
) -> AsyncIterator[Watched]:
    watched = Watched(directory, list(components), terminate_s=terminate_s)
    task = asyncio.create_task(watched.run())
    try:
        async with asyncio.timeout(20):
            await watched.ready.wait()
        yield watched
    finally:
        watched.stop.set()
        async with asyncio.timeout(20):
            await task


def is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


async def test_a_component_starts_once_those_it_comes_after_are_ready(directory: StateDir) -> None:
    first, second = dummy(directory, "first"), dummy(directory, "second", after=("first",))

    async with running(directory, second, first) as watched:
        ready = [line.split()[0] for line in watched.reports if " ready after " in line]
        assert ready == ["first", "second"]
        assert all(state.ready for state in watched.states.values())


async def test_what_is_not_awaited_starts_once_the_others_are_ready(directory: StateDir) -> None:
    late = replace(dummy(directory, "late"), awaited=False)
    awaited = dummy(directory, "awaited", before="import time; time.sleep(0.3)")

    async with running(directory, late, awaited) as watched:
        assert watched.states["awaited"].ready
        assert "late" not in watched.pids

        await until(lambda: watched.states["late"].ready)


async def test_a_killed_component_is_started_again_and_gets_ready_again(
    directory: StateDir,
) -> None:
    async with running(directory, dummy(directory, "one")) as watched:
        os.kill(watched.pids["one"][0], signal.SIGKILL)

        await until(lambda: len(watched.pids["one"]) == 2 and watched.states["one"].ready)

        assert watched.states["one"].restarts == 1
        assert any("killed by SIGKILL" in line for line in watched.reports)


async def test_stopping_ends_every_process_in_reverse_order(directory: StateDir) -> None:
    ends = directory.root / "ends"
    noting = (
        "import signal, sys\n"
        "def end(*_):\n open({ends!r}, 'a').write({name!r}); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
    )
    parts = [
        dummy(directory, name, after=after, before=noting.format(ends=str(ends), name=name))
        for name, after in (("a", ()), ("b", ("a",)), ("c", ("a", "b")))
    ]

    async with running(directory, *parts) as watched:
        pids = [pids[0] for pids in watched.pids.values()]

    assert ends.read_text() == "cba"
    assert not any(is_alive(pid) for pid in pids)


async def test_a_component_that_ignores_sigterm_is_killed(directory: StateDir) -> None:
    stubborn = dummy(directory, "stubborn", before=STUBBORN)

    async with running(directory, stubborn, terminate_s=0.2) as watched:
        pid = watched.pids["stubborn"][0]

    assert not is_alive(pid)


async def test_a_component_that_never_gets_ready_is_given_up_with_the_end_of_its_log(
    directory: StateDir,
) -> None:
    good = dummy(directory, "good")
    bad = Component(
        name="bad",
        argv=(sys.executable, "-c", "raise SystemExit('no such thing')"),
        after=("good",),
        checks=(RunFileCheck(path=directory.run_file("bad")),),
    )
    watched = Watched(directory, [good, bad])

    with pytest.raises(StartError, match=r"bad exited 4 times \(exit code 1\)[\s\S]*no such thing"):
        await watched.run()

    assert not is_alive(watched.pids["good"][0])


async def test_a_program_that_is_not_there_is_named(directory: StateDir) -> None:
    watched = Watched(directory, [Component(name="none", argv=("/no/such/program",))])

    with pytest.raises(StartError, match=r"none cannot be started: .*/no/such/program"):
        await watched.run()


async def test_a_component_that_is_too_slow_is_named(directory: StateDir) -> None:
    slow = dummy(directory, "slow", before="import time; time.sleep(600)")
    watched = Watched(directory, [slow], ready_s=0.3)

    with pytest.raises(StartError, match=r"no component became ready for 0.3 s; missing: slow"):
        await watched.run()

    assert not is_alive(watched.pids["slow"][0])


async def test_each_component_that_becomes_ready_allows_the_others_more_time(
    directory: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop's clock is put forward each time, by most of the longest pause."""
    names = ("a", "b", "c", "d")
    pause_s = 60.0
    forward_s = 0.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: time.monotonic() + forward_s)
    chain = [
        dummy(directory, name, after=tuple(names[:number])) for number, name in enumerate(names)
    ]
    watched = Watched(directory, chain, ready_s=pause_s)

    def report(line: str) -> None:
        nonlocal forward_s
        watched.reports.append(line)
        forward_s += 0.6 * pause_s if " ready after " in line else 0.0

    for process in watched.supervisor.processes.values():
        process.report = report
    task = asyncio.create_task(watched.run())

    await until(lambda: watched.ready.is_set() or task.done(), limit_s=10 * pause_s)

    assert forward_s > 2 * pause_s
    assert any(re.match(r"  \d of 4 start for \d s: .*\bd\b", line) for line in watched.reports)
    watched.stop.set()
    await task


async def test_a_stop_during_the_start_ends_what_had_started(directory: StateDir) -> None:
    slow = dummy(directory, "slow", before="import time; time.sleep(600)")
    watched = Watched(directory, [slow])
    task = asyncio.create_task(watched.run())
    await until(lambda: watched.pids.get("slow"))

    watched.stop.set()

    async with asyncio.timeout(20):
        await task
    assert not is_alive(watched.pids["slow"][0])
    assert not watched.ready.is_set()


@contextlib.asynccontextmanager
async def supervisor_process(root: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.support.servers.supervised", str(root)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(20):
            while (await process.stdout.readline()).strip() != b"ready":
                assert process.returncode is None
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_kill_9_of_the_supervisor_leaves_no_component_running(directory: StateDir) -> None:
    async with supervisor_process(directory.root) as process:
        parts = [pid for pid in leftovers(directory) if _parent(pid) == process.pid]
        assert len(parts) == 2

        process.kill()
        await process.wait()

        await until(lambda: not any(is_alive(pid) for pid in parts))


async def test_what_a_component_had_started_is_found_and_killed_after_kill_9(
    directory: StateDir,
) -> None:
    async with supervisor_process(directory.root) as process:
        process.kill()
        await process.wait()
        await until(lambda: len(leftovers(directory)) == 1)

        assert kill_leftovers(directory) == 1

    assert leftovers(directory) == []


async def test_a_second_supervisor_gets_the_pid_of_the_first(
    directory: StateDir,
) -> None:
    async with supervisor_process(directory.root) as process:
        assert supervisor_pid(directory) == process.pid

        with pytest.raises(AlreadyRunningError, match=f"in use by process {process.pid}"):
            locked(directory).__enter__()


async def test_the_lock_is_free_as_soon_as_its_holder_was_killed(directory: StateDir) -> None:
    async with supervisor_process(directory.root) as process:
        process.kill()
        await process.wait()

    assert supervisor_pid(directory) is None
    with locked(directory):
        assert directory.lock.read_text().strip() == str(os.getpid())


async def test_down_ends_the_supervisor_and_everything_under_it(
    directory: StateDir, capsys: pytest.CaptureFixture[str]
) -> None:
    async with supervisor_process(directory.root):
        code = await asyncio.to_thread(down, Down(state=directory.root))

    assert code == 0
    assert leftovers(directory) == []
    assert "nothing is left running" in capsys.readouterr().out


def test_down_reports_that_nothing_runs(
    directory: StateDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert down(Down(state=directory.root)) == 0
    assert "nothing runs" in capsys.readouterr().out


def test_wiping_keeps_the_lock_and_refuses_a_directory_that_is_not_ours(tmp_path: Path) -> None:
    ours = StateDir(tmp_path / "ours")
    other = StateDir(tmp_path / "other")
    for directory in (ours, other):
        directory.make()
        (directory.root / "photos").mkdir()
    ours.state.write_text("{}")
    ours.lock.touch()

    wipe(ours)

    assert [path.name for path in ours.root.iterdir()] == ["lock"]
    with pytest.raises(RequestError, match="is not a state directory"):
        wipe(other)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
