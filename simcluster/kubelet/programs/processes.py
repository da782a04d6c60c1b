"""The processes of one node's containers: started, logged and ended."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import IO, Protocol

from shared.model.errors import UnavailableError
from simcluster.kubelet.containers.container_state import (
    ContainerLog,
    ContainerPhase,
    ContainerState,
    MountPoint,
)
from simcluster.kubelet.programs.process_table import HOST, ProcessTable
from simcluster.kubelet.settings import NodeFiles
from simcluster.ports import ExecStreams

logger = logging.getLogger(__name__)

LAUNCHER = Path(__file__).with_name("launcher.py")
MARKER = "SIMULATED_CONTAINER"
"""Variable of a container's processes, by which those that leave their session are found."""
_SUPERVISED = "LEASEHOLD_SUPERVISED"
"""Variable of this process, if it has it, by which `leasehold down` finds all processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a command of a container is started on this machine."""

    command: Sequence[str]
    environment: Mapping[str, str]
    directory: Path
    root: Path | None = None
    """An empty directory: the program gets a mount namespace of its own, with these mounts."""
    mounts: Sequence[MountPoint] = ()
    hidden: Sequence[str] = ()
    """Files of this machine that it does not have there."""
    own_users: bool = False
    """The namespace is made as any user may: only this user is known in it."""
    writable: Sequence[tuple[str, str]] = ()
    """Places, and what lies there for the program, which can write to nothing else."""


class Namespaces(StrEnum):
    """The namespaces of a container's processes; empty: none."""

    OF_ROOT = "of root"
    OF_ANY_USER = "of any user"
    NONE = ""


def possible_namespaces(launch: Callable[[Namespaces], Launch]) -> Namespaces:
    """Return the namespaces that processes can have here: the first in which `launch` starts."""
    for kind in (Namespaces.OF_ROOT, Namespaces.OF_ANY_USER):
        try:
            probe = start_process(launch(kind))
        except StartError as error:
            logger.info("no namespaces %s: %s", kind, error)
        else:
            probe.communicate()
            if probe.returncode == 0:
                return kind
    return Namespaces.NONE


class Programs(Protocol):
    """Which commands of containers are processes of this machine, and what these get."""

    def has(self, command: Sequence[str], *, built_in: bool) -> bool:
        """Return whether a command is started; `built_in`: it can also be simulated."""
        ...

    def launch(self, state: ContainerState, command: Sequence[str]) -> Launch:
        """Return how it is started. Raises UnavailableError while it cannot be."""
        ...

    def not_run(self, image: str, command: Sequence[str]) -> str:
        """Say for a container's log why its command is not started."""
        ...

    def pulled(self, image: str) -> str:
        """Say for an Event what became of the image."""
        ...

    def outlive(self, state: ContainerState) -> bool:
        """Return whether a container's processes stay on the node when it is stopped."""
        ...


class StartError(Exception):
    """A command that cannot be started; the message is that of a container runtime."""


CANNOT_RUN = 126
KILLED = 137
_LOOK_S = 0.2
"""How often the container and the program's children are looked at."""
_KILL_S = 0.02
"""How often the processes of a container that has ended are killed, until none is left."""
_KEPT_S = 0.5
"""How often it is looked whether processes that outlived their container may end."""
_CHUNK_BYTES = 32 * 1024
_LINE_BYTES = 16 * 1024
"""The longest line of a log; a container runtime cuts it there, too."""
Writer = Callable[[bytes], Awaitable[None]]
Process = subprocess.Popen[bytes]
"""Not a process of asyncio: gRPC's handlers of fork, which that would run, crash the child."""


class NodeProcesses:
    """The processes of one node's containers. They survive a restart of the kubelet."""

    def __init__(self, files: NodeFiles, programs: Programs) -> None:
        self.programs = programs
        self._table = ProcessTable(files.proc)
        self._root = files.root
        self._processes: dict[str, Process] = {}
        """The first process of each container, by the container's ID."""
        self._endings: dict[str, asyncio.Task[int]] = {}
        self._attached: defaultdict[str, list[ExecStreams]] = defaultdict(list)
        """The clients that are attached to each container."""
        self._states: dict[str, ContainerState] = {}
        self._kept: set[asyncio.Task[None]] = set()
        """The ends of processes that outlived their containers."""

    def usage(self) -> Mapping[str, tuple[float, int]]:
        """Return the cores in use and the bytes of memory of each container's processes."""
        return self._table.usage()

    async def clear(self) -> None:
        """End and forget the processes of an earlier run."""
        await asyncio.to_thread(self._table.clear)
        await asyncio.to_thread(_kill_marked, str(self._root))

    async def end_all(self) -> None:
        """Kill all processes, as a reboot does."""
        for process in self._processes.values():
            _signal_group(process, signal.SIGKILL)
        for task in self._kept:
            task.cancel()
        await asyncio.gather(*self._endings.values())
        await asyncio.gather(*self._kept, return_exceptions=True)

    async def start(
        self,
        pod_uid: str,
        container_id: str,
        state: ContainerState,
        command: Sequence[str],
        *,
        stdin: bool = False,
        tty: bool = False,
    ) -> None:
        """Start a container's command. Raises StartError, and UnavailableError for now."""
        launch = await asyncio.to_thread(self.programs.launch, state, command)
        source = subprocess.PIPE if stdin else subprocess.DEVNULL
        process = await self._started(launch, container_id, stdin=source, tty=tty)
        self._processes[container_id] = process
        self._states[container_id] = state
        ending = self._attend_main(process, pod_uid, container_id, state.log)
        self._endings[container_id] = asyncio.create_task(ending)
        try:
            # Whoever sees the container run finds its process in the node's /proc.
            await asyncio.to_thread(self._table.add_tree, process.pid, pod_uid, container_id)
        except asyncio.CancelledError:  # the kubelet restarts, and starts another container
            _signal_group(process, signal.SIGKILL)
            raise

    async def wait(self, container_id: str) -> int:
        """Return the exit code of a container's command when it has ended.

        The processes of an earlier simulated cluster were killed with it.
        """
        ending = self._endings.get(container_id)
        if ending is None:
            return KILLED
        code = await asyncio.shield(ending)
        self._endings.pop(container_id, None)
        return code

    async def stop(self, container_id: str, grace_s: float, now: asyncio.Event) -> int:
        """Terminate a container's command, and kill it after its grace or `now`."""
        process = self._processes.get(container_id)
        ending = self._endings.get(container_id)
        if process is not None and ending is not None:
            await self._keep_stuck(container_id)
            if grace_s > 0:
                process.terminate()
                hurry = asyncio.create_task(now.wait())
                await asyncio.wait(
                    [ending, hurry], timeout=grace_s, return_when=asyncio.FIRST_COMPLETED
                )
                hurry.cancel()
            _signal_group(process, signal.SIGKILL)
        return await self.wait(container_id)

    async def _keep_stuck(self, container_id: str) -> None:
        """Let the processes stay on the node for as long as they outlive their container."""
        state = self._states[container_id]
        if await asyncio.to_thread(self.programs.outlive, state):
            await asyncio.to_thread(self._table.keep, container_id)
            task = asyncio.create_task(self._end_stuck(container_id, state))
            self._kept.add(task)
            task.add_done_callback(self._kept.discard)

    async def _end_stuck(self, container_id: str, state: ContainerState) -> None:
        try:
            while await asyncio.to_thread(self.programs.outlive, state):  # noqa: ASYNC110 - a file
                await asyncio.sleep(_KEPT_S)
        finally:
            self._table.drop(container_id)

    async def attach(self, container_id: str, streams: ExecStreams) -> bool:
        """Attach a client to a container's command until that ends; False if it has no process."""
        process = self._processes.get(container_id)
        ending = self._endings.get(container_id)
        if process is None or ending is None:
            return False
        clients = self._attached[container_id]
        clients.append(streams)
        feeding = asyncio.create_task(_feed(process, streams))
        try:
            await asyncio.wait([ending])
        finally:
            feeding.cancel()
            clients.remove(streams)
        return True

    async def run(
        self,
        pod_uid: str,
        state: ContainerState,
        command: Sequence[str],
        streams: ExecStreams,
        *,
        tty: bool = False,
    ) -> int:
        """Run a command in a container until it or the container ends; return its exit code."""
        try:
            launch = await asyncio.to_thread(self.programs.launch, state, command)
            process = await self._started(launch, state.container_id, tty=tty)
        except (UnavailableError, StartError) as error:
            await streams.write_stderr(f"{command[0]}: {error}\n".encode())
            return CANNOT_RUN
        try:
            return await self._attend(process, pod_uid, state, streams)
        finally:
            _signal_group(process, signal.SIGKILL)
            await asyncio.to_thread(process.wait)
            _close_input(process)
            await asyncio.to_thread(self._table.remove_ended, state.container_id)

    async def _started(
        self,
        launch: Launch,
        container_id: str,
        *,
        stdin: int = subprocess.PIPE,
        tty: bool = False,
    ) -> Process:
        """Start a process of a container; if this is cancelled, none is left."""
        own = {MARKER: f"{self._root}/{container_id}"}
        if _SUPERVISED in os.environ:
            own[_SUPERVISED] = os.environ[_SUPERVISED]
        launch = replace(launch, environment={**launch.environment, **own})
        call = partial(start_on_terminal, launch) if tty else partial(start_process, launch, stdin)
        starting = asyncio.create_task(asyncio.to_thread(call))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            with contextlib.suppress(StartError):
                process = await starting
                _signal_group(process, signal.SIGKILL)
                await asyncio.to_thread(process.communicate)
            raise

    async def _attend_main(
        self, process: Process, pod_uid: str, container_id: str, log: ContainerLog
    ) -> int:
        clients = self._attached[container_id]

        def writer(errors: bool) -> Writer:
            lines = LineWriter(log)

            async def write(data: bytes) -> None:
                await lines.write(data)
                for client in tuple(clients) if data else ():
                    await (client.write_stderr if errors else client.write_stdout)(data)

            return write

        outputs = [
            asyncio.create_task(_copy(process.stdout, writer(errors=False))),
            asyncio.create_task(_copy(process.stderr, writer(errors=True))),
        ]
        while (code := process.poll()) is None:
            await asyncio.to_thread(self._table.add_tree, process.pid, pod_uid, container_id)
            await asyncio.sleep(_LOOK_S)
        await asyncio.to_thread(_kill_marked, f"{self._root}/{container_id}")
        while await asyncio.to_thread(self._table.kill, container_id):  # noqa: ASYNC110 - processes
            await asyncio.sleep(_KILL_S)
        await asyncio.wait(outputs)
        _close_input(process)
        del self._processes[container_id], self._attached[container_id], self._states[container_id]
        return _exit_code(code)

    async def _attend(
        self, process: Process, pod_uid: str, state: ContainerState, streams: ExecStreams
    ) -> int:
        async with asyncio.TaskGroup() as tasks:
            helpers = [
                tasks.create_task(self._watch(process, pod_uid, state, streams)),
                tasks.create_task(_feed(process, streams)),
            ]
            outputs = [
                tasks.create_task(_copy(process.stdout, streams.write_stdout)),
                tasks.create_task(_copy(process.stderr, streams.write_stderr)),
            ]
            await asyncio.wait(outputs)
            code = await asyncio.to_thread(process.wait)
            for helper in helpers:
                helper.cancel()
        return _exit_code(code)

    async def _watch(
        self, process: Process, pod_uid: str, state: ContainerState, streams: ExecStreams
    ) -> None:
        """Show the program and its children in the node's /proc; kill it with its container.

        Its terminal gets the size of the client's.
        """
        container = state.container_id
        size = None
        stdin = process.stdin
        while True:
            if streams.size != size and stdin and not stdin.closed and stdin.isatty():
                size = streams.size
                termios.tcsetwinsize(stdin, (size[1], size[0]) if size else (0, 0))
            running = state.phase is ContainerPhase.RUNNING and state.container_id == container
            if not running:
                os.killpg(process.pid, signal.SIGKILL)
                return
            await asyncio.to_thread(self._table.add_tree, process.pid, pod_uid, container)
            await asyncio.sleep(_LOOK_S)


def start_process(
    launch: Launch,
    stdin: int = subprocess.PIPE,
    *,
    output: int = subprocess.PIPE,
    tty: bool = False,
) -> Process:
    """Start a command of a container; it has the mounts if it has a root. Raises StartError."""
    if launch.root is None and not launch.writable and not tty:
        try:
            return _spawn(launch.command, launch.environment, (stdin, output), launch.directory)
        except FileNotFoundError as error:
            text = f'exec: "{launch.command[0]}": executable file not found in $PATH'
            raise StartError(text) from error
        except (OSError, ValueError) as error:
            raise StartError(f'exec: "{launch.command[0]}": {error}') from error
    spec = {
        "command": launch.command,
        "environment": launch.environment,
        "directory": str(launch.directory),
        "root": str(launch.root or ""),
        "mounts": [
            (mount.container_path, mount.host_path, mount.read_only) for mount in launch.mounts
        ],
        "hidden": launch.hidden,
        "own_users": launch.own_users,
        "writable": launch.writable,
        "tty": tty,
    }
    failure, failed = os.pipe()
    with tempfile.TemporaryFile() as given, os.fdopen(failure, "rb") as reader:
        given.write(json.dumps(spec).encode())
        given.seek(0)
        try:
            descriptors = (given.fileno(), failed)
            command = [sys.executable, "-I", "-S", str(LAUNCHER), *map(str, descriptors)]
            process = _spawn(command, os.environ, (stdin, output), pass_fds=descriptors)
        finally:
            os.close(failed)
        text = reader.read().decode()  # it ends when the program starts
    if text:
        process.communicate()
        raise StartError(text)
    return process


def start_on_terminal(launch: Launch) -> Process:
    """Start a command on a terminal of its own, whose other end is its input and output here."""
    ours, theirs = os.openpty()
    try:
        process = start_process(launch, theirs, output=theirs, tty=True)
    except StartError:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    process.stdin = os.fdopen(os.dup(ours), "wb", buffering=0)
    process.stdout = os.fdopen(ours, "rb", buffering=0)
    return process


def _spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    streams: tuple[int, int],
    directory: Path | None = None,
    pass_fds: Sequence[int] = (),
) -> Process:
    stdin, output = streams
    return subprocess.Popen(  # noqa: S603 - what the pod's owner wants to run
        command,
        env=environment,
        cwd=directory,
        stdin=stdin,
        stdout=output,
        stderr=output,
        start_new_session=True,
        pass_fds=pass_fds,
        bufsize=0,
    )


def _exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def _close_input(process: Process) -> None:
    """Close the input of a process that has ended, which a client may not have ended."""
    if process.stdin is not None:
        process.stdin.close()


def _signal_group(process: Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _kill_marked(prefix: str) -> None:
    """Kill the processes whose marker begins so."""
    marker = f"{MARKER}={prefix}".encode()
    for entry in HOST.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(variable.startswith(marker) for variable in _variables(entry)):
                os.kill(int(entry.name), signal.SIGKILL)


def _variables(entry: Path) -> list[bytes]:
    return (entry / "environ").read_bytes().split(b"\0")


class LineWriter:
    """Writes output to a log, line by line."""

    def __init__(self, log: ContainerLog) -> None:
        self._log = log
        self._rest = b""

    async def write(self, data: bytes) -> None:
        """Add the whole lines; no data is the end of the output."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LINE_BYTES or (self._rest and not data):
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._log.add(time.time(), line.decode(errors="replace"))


async def _copy(source: IO[bytes] | None, write: Writer) -> None:
    if source is None:
        return
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), source
    )
    try:
        with contextlib.suppress(OSError):  # so ends a terminal
            while data := await reader.read(_CHUNK_BYTES):
                await write(data)
        await write(b"")
    finally:
        transport.close()


async def _feed(process: Process, streams: ExecStreams) -> None:
    """Pass the client's input on; a pipe holds what the program has not read yet."""
    if process.stdin is None:
        return
    with contextlib.suppress(OSError):
        while data := await streams.read_stdin():
            await asyncio.to_thread(process.stdin.write, data)
        process.stdin.close()
