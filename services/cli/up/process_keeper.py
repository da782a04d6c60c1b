"""Keeping one part alive: started, seen ready, started again when it ends, stopped when told."""

import asyncio
import contextlib
import os
import signal
import time
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Callable
from pathlib import Path

from services.cli.state_dir import MARK, PartState, StateDir
from services.cli.up.orphans import dies_with_us
from services.cli.up.parts import Announces, Exists, Part
from services.cli.up.readiness import announced_address, is_ready
from services.cli.up.restart_policy import Life, RestartPolicy, after_exit, is_hopeless, pause_s
from shared.model.errors import LeaseholdError

POLL_S = 0.02
STOP_S = 5.0
"""Time between SIGTERM and SIGKILL."""


class StartError(LeaseholdError):
    """A part does not get ready; the message ends in the last lines of its log."""


class Keeper:
    """One part and whatever process it has at the moment."""

    def __init__(
        self,
        part: Part,
        directory: StateDir,
        *,
        policy: RestartPolicy,
        say: Callable[[str], None],
        changed: Callable[[], None],
    ) -> None:
        self.part = part
        self.directory = directory
        self.policy = policy
        self.say = say
        self.changed = changed
        self.life = Life()
        self.pid: int | None = None
        self._begun = False
        self.ready = asyncio.Event()
        self._stopping = asyncio.Event()
        self._finished = asyncio.Event()

    @property
    def log(self) -> Path:
        """Where the part's output goes."""
        return self.directory.log(self.part.name)

    def state(self) -> PartState:
        """Return what others may know of the part."""
        return PartState(
            name=self.part.name,
            pid=self.pid,
            address=announced_address(self.part),
            log=str(self.log),
            ready=self.ready.is_set(),
            restarts=self.life.restarts,
        )

    def begin(self, tasks: asyncio.TaskGroup) -> None:
        """Keep the part alive until `stop`; StartError reaches the group if it never gets ready."""
        self._begun = True
        tasks.create_task(self._run())

    async def _run(self) -> None:
        self._clear()
        try:
            while not self._stopping.is_set():
                began = time.monotonic()
                code = await self._live_once(began)
                if not self._stopping.is_set():
                    await self._after(code, time.monotonic() - began)
        finally:
            self._finished.set()

    async def stop(self) -> None:
        """End the part's process, gently first, and return when it has ended."""
        self._stopping.set()
        if self._begun:
            await self._finished.wait()

    def tail(self, lines: int = 12) -> str:
        """Return the last lines of the log, indented."""
        with contextlib.suppress(OSError):
            text = self.log.read_text(encoding="utf-8", errors="replace")
            return "\n".join(f"  {line}" for line in text.splitlines()[-lines:]) or "  (empty)"
        return "  (no log)"

    async def _live_once(self, began: float) -> int:
        process = await self._spawn()
        try:
            async with asyncio.TaskGroup() as tasks:
                beside = [
                    tasks.create_task(self._watch(process.pid, began)),
                    tasks.create_task(self._end_when_told(process)),
                ]
                await process.wait()
                for task in beside:
                    task.cancel()
        finally:
            await _end(process)
            self.pid = None
            self.ready.clear()
            self.changed()
        return process.returncode or 0

    async def _end_when_told(self, process: Process) -> None:
        await self._stopping.wait()
        await _end(process)

    async def _spawn(self) -> Process:
        try:
            with self.log.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *self.part.argv,
                    stdin=DEVNULL,
                    stdout=log,
                    stderr=STDOUT,
                    env={**os.environ, **self.part.environment, MARK: str(self.directory.root)},
                    start_new_session=True,
                    preexec_fn=dies_with_us(),
                )
        except OSError as error:
            raise StartError(f"{self.part.name} cannot be started: {error}") from error
        self.pid = process.pid
        self.changed()
        return process

    async def _watch(self, pid: int, began: float) -> None:
        while not await is_ready(self.part, pid):  # noqa: ASYNC110 - another process gets ready
            await asyncio.sleep(POLL_S if time.monotonic() - began < 5 else POLL_S * 10)
        again = self.life.ever_ready
        self.life = Life(
            restarts=self.life.restarts, exits_in_row=self.life.exits_in_row, ever_ready=True
        )
        took_s = time.monotonic() - began
        address = announced_address(self.part)
        note = " again" if again else ""
        self.say(f"  {self.part.name:<14} {address:<34} ready{note} after {took_s:.1f} s")
        self.ready.set()
        self.changed()

    async def _after(self, code: int, ran_s: float) -> None:
        self.life = after_exit(self.life, self.policy, ran_s=ran_s)
        if is_hopeless(self.life, self.policy):
            raise StartError(
                f"{self.part.name} ended {self.life.restarts} times ({ending(code)}) and was never "
                f"ready; the end of {self.log}:\n{self.tail()}"
            )
        pause = pause_s(self.life, self.policy)
        self.say(
            f"  {self.part.name:<14} ended ({ending(code)}) after {ran_s:.1f} s, "
            f"started again in {pause:g} s"
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._stopping.wait()

    def _clear(self) -> None:
        for check in self.part.checks:
            if isinstance(check, Exists | Announces):
                check.path.unlink(missing_ok=True)


def ending(code: int) -> str:
    """Say how a process ended."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


async def _end(process: Process) -> None:
    for number, patience_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await process.wait()
