"""Runs all components: starts each after its dependencies, restarts it, stops in reverse order."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from services.cli.state_dir import SUPERVISED_VARIABLE, ComponentState, StateDir, read_object
from services.cli.up.components import (
    Component,
    FileCheck,
    ReadinessCheck,
    RunFileCheck,
    TcpCheck,
    stages_of,
)
from services.cli.up.servers import HOST
from shared.model.errors import LeaseholdError


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    first_pause_s: float = 0.2
    """Pause before the first restart; each further exit in a row doubles it."""
    max_pause_s: float = 5.0
    """The longest such pause."""
    stable_s: float = 10.0
    """After a run of this length the next restart has the first pause again."""
    max_starts: int = 4
    """A component that exited this often and was never ready is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartHistory:
    restarts: int = 0
    exits_in_row: int = 0
    ever_ready: bool = False


def after_exit(history: RestartHistory, policy: RestartPolicy, *, ran_s: float) -> RestartHistory:
    in_row = 1 if ran_s >= policy.stable_s else history.exits_in_row + 1
    return replace(history, restarts=history.restarts + 1, exits_in_row=in_row)


def pause_s(history: RestartHistory, policy: RestartPolicy) -> float:
    doublings = min(max(history.exits_in_row - 1, 0), 30)
    return min(policy.first_pause_s * 2.0**doublings, policy.max_pause_s)


def is_given_up(history: RestartHistory, policy: RestartPolicy) -> bool:
    return not history.ever_ready and history.restarts >= policy.max_starts


TCP_TIMEOUT_S = 1.0
"""Time limit of a connection that shows whether a server listens."""


async def is_ready(component: Component, pid: int) -> bool:
    for check in component.checks:
        if not await _passes(check, pid):
            return False
    return True


def address_of(component: Component) -> str:
    if component.address:
        return component.address
    contents = (
        read_object(check.path) for check in component.checks if isinstance(check, RunFileCheck)
    )
    return next((f"http://{content['http']}" for content in contents if content.get("http")), "")


async def _passes(check: ReadinessCheck, pid: int) -> bool:
    match check:
        case FileCheck(path=path):
            return path.exists()
        case RunFileCheck(path=path):
            return read_object(path).get("pid") == pid
        case TcpCheck():
            return await _responds(check)


async def _responds(check: TcpCheck) -> bool:
    try:
        async with asyncio.timeout(TCP_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(HOST, check.port)
            try:
                writer.write(check.send)
                received = await reader.readexactly(len(check.expect)) if check.expect else b""
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False
    return received == check.expect


_PR_SET_PDEATHSIG = 1


class StartError(LeaseholdError):
    """Its message ends with the last lines of the component's log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisionTiming:
    ready_s: float = 60.0
    """The longest pause without another component being ready."""
    progress_s: float = 10.0
    """Interval of reports of what is not ready yet."""
    poll_s: float = 0.02
    """Interval of readiness checks; ten times as long once a start has lasted 5 s."""
    terminate_s: float = 5.0
    """Between SIGTERM and SIGKILL."""


@dataclass(eq=False)
class ComponentProcess:
    component: Component
    directory: StateDir
    policy: RestartPolicy
    timing: SupervisionTiming
    report: Callable[[str], None]
    on_change: Callable[[], None]
    history: RestartHistory = field(default_factory=RestartHistory)
    pid: int | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Task[None] | None = None

    @property
    def log(self) -> Path:
        return self.directory.log(self.component.name)

    def state(self) -> ComponentState:
        return ComponentState(
            name=self.component.name,
            pid=self.pid,
            address=address_of(self.component),
            log=str(self.log),
            ready=self.ready.is_set(),
            restarts=self.history.restarts,
            awaited=self.component.awaited,
        )

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """The task raises StartError if the component never becomes ready."""
        self._task = tasks.create_task(self._run())

    async def _run(self) -> None:
        self._remove_check_files()
        while True:
            started_at_s = time.monotonic()
            code = await self._run_once(started_at_s)
            await self._pause_after_exit(code, time.monotonic() - started_at_s)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def log_tail(self, lines: int = 12) -> str:
        with contextlib.suppress(OSError):
            text = self.log.read_text(encoding="utf-8", errors="replace")
            return "\n".join(f"  {line}" for line in text.splitlines()[-lines:]) or "  (empty)"
        return "  (no log)"

    async def _run_once(self, started_at_s: float) -> int:
        process = await self._spawn()
        try:
            async with asyncio.TaskGroup() as tasks:
                readiness = tasks.create_task(self._await_readiness(process.pid, started_at_s))
                code = await process.wait()
                readiness.cancel()
                return code
        finally:
            await self._terminate(process)
            self.pid = None
            self.ready.clear()
            self.on_change()

    async def _spawn(self) -> Process:
        marker = {SUPERVISED_VARIABLE: str(self.directory.root)}
        try:
            with self.log.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *self.component.argv,
                    stdin=DEVNULL,
                    stdout=log,
                    stderr=STDOUT,
                    env={**os.environ, **self.component.environment, **marker},
                    start_new_session=True,
                    preexec_fn=_die_with_parent(),
                )
        except OSError as error:
            raise StartError(f"{self.component.name} cannot be started: {error}") from error
        self.pid = process.pid
        self.on_change()
        return process

    async def _await_readiness(self, pid: int, started_at_s: float) -> None:
        poll_s = self.timing.poll_s
        while not await is_ready(self.component, pid):
            is_recent = time.monotonic() - started_at_s < 5
            await asyncio.sleep(poll_s if is_recent else poll_s * 10)
        again = " again" if self.history.ever_ready else ""
        self.history = replace(self.history, ever_ready=True)
        took_s = time.monotonic() - started_at_s
        name = self.component.name
        address = address_of(self.component)
        if self.component.awaited or again:
            self.report(f"  {name:<14} {address:<34} ready{again} after {took_s:.1f} s")
        self.ready.set()
        self.on_change()

    async def _pause_after_exit(self, code: int, ran_s: float) -> None:
        name = self.component.name
        self.history = after_exit(self.history, self.policy, ran_s=ran_s)
        if is_given_up(self.history, self.policy):
            raise StartError(
                f"{name} exited {self.history.restarts} times ({describe_exit(code)}) and was "
                f"never ready; the end of {self.log}:\n{self.log_tail()}"
            )
        pause = pause_s(self.history, self.policy)
        self.report(
            f"  {name:<14} exited ({describe_exit(code)}) after {ran_s:.1f} s, "
            f"restarts in {pause:g} s"
        )
        await asyncio.sleep(pause)

    async def _terminate(self, process: Process) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.returncode is not None:
                return
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.timing.terminate_s):
                    await process.wait()

    def _remove_check_files(self) -> None:
        for check in self.component.checks:
            if isinstance(check, FileCheck | RunFileCheck):
                check.path.unlink(missing_ok=True)


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


def _die_with_parent() -> Callable[[], None]:
    """Return the `preexec_fn` with which the kernel kills a child when this process ends.

    The library is loaded here: a child between fork and exec should do as little as possible.
    """
    if not sys.platform.startswith("linux"):
        return lambda: None
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def set_parent_death_signal() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it exited before prctl took effect
            os._exit(1)

    return set_parent_death_signal


class Supervisor:
    def __init__(
        self,
        components: Sequence[Component],
        directory: StateDir,
        *,
        report: Callable[[str], None],
        save: Callable[[tuple[ComponentState, ...], bool], None],
        policy: RestartPolicy | None = None,
        timing: SupervisionTiming | None = None,
    ) -> None:
        self.save = save
        self.report = report
        self.timing = timing or SupervisionTiming()
        self.all_ready = False
        self.stages = [
            [
                ComponentProcess(
                    component,
                    directory,
                    policy=policy or RestartPolicy(),
                    timing=self.timing,
                    report=report,
                    on_change=self._save_state,
                )
                for component in stage
            ]
            for stage in stages_of(components)
        ]
        self.processes = {
            process.component.name: process for stage in self.stages for process in stage
        }
        self._awaited = [
            process for process in self.processes.values() if process.component.awaited
        ]

    async def run(self, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
        """Call `on_ready`, and stop everything once `stop` is set.

        Raises StartError if a component does not get ready; nothing is left running then either.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                starting = tasks.create_task(self._start(tasks))
                stopping = tasks.create_task(stop.wait())
                await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if not stop.is_set():
                    self.all_ready = True
                    self._save_state()
                    on_ready()
                    for process in self.processes.values():
                        if not process.component.awaited:
                            process.start(tasks)
                    await stopping
                starting.cancel()
                await self._stop()
        except* StartError as errors:
            raise errors.exceptions[0] from None

    def states(self) -> tuple[ComponentState, ...]:
        return tuple(process.state() for process in self.processes.values())

    async def _start(self, tasks: asyncio.TaskGroup) -> None:
        pause_s = self.timing.ready_s
        now_s = asyncio.get_running_loop().time
        progress = tasks.create_task(self._report_progress())
        try:
            async with asyncio.timeout(pause_s) as limit, asyncio.TaskGroup() as starting:

                async def start(process: ComponentProcess) -> None:
                    await self._start_one(process, tasks)
                    limit.reschedule(now_s() + pause_s)

                for process in self._awaited:
                    starting.create_task(start(process))
        except TimeoutError as error:
            late = [process for process in self._awaited if not process.ready.is_set()]
            if not late:
                return
            raise StartError(
                f"no component became ready for {pause_s:g} s; missing: "
                f"{', '.join(process.component.name for process in late)}; the end of "
                f"{late[0].log}:\n{late[0].log_tail()}"
            ) from error
        finally:
            progress.cancel()

    async def _report_progress(self) -> None:
        started_at_s = time.monotonic()
        while True:
            await asyncio.sleep(self.timing.progress_s)
            late = [
                process.component.name for process in self._awaited if not process.ready.is_set()
            ]
            names = ", ".join(late[:3]) + (", ..." if late[3:] else "")
            took_s = time.monotonic() - started_at_s
            self.report(f"  {len(late)} of {len(self._awaited)} start for {took_s:.0f} s: {names}")

    async def _start_one(self, process: ComponentProcess, tasks: asyncio.TaskGroup) -> None:
        for name in process.component.after:
            if name in self.processes:
                await self.processes[name].ready.wait()
        process.start(tasks)
        await process.ready.wait()

    async def _stop(self) -> None:
        for stage in reversed(self.stages):
            await asyncio.gather(*(process.stop() for process in stage))

    def _save_state(self) -> None:
        self.save(self.states(), self.all_ready)
