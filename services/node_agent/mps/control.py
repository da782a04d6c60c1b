"""Starts a control daemon of MPS, and sends it commands: a process for each, with a time limit.

https://docs.nvidia.com/deploy/mps/latest/mpsv2-interface.html (from R495 on) and
mpsv3-interface.html (from R615 on).
"""

import asyncio
import contextlib
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from services.node_agent.files import irregular, open_checked, remove_tree
from services.node_agent.mps.daemon import WedgedError
from services.node_agent.programs import SilentError, UnseenError, execute
from shared.dialects.mps import LOG_VARIABLE, PIPE_VARIABLE
from shared.model.errors import UnavailableError

COMMAND_S = 10.0
"""Time limit of a command: a daemon that is well replies within milliseconds."""
START_S = 20.0
"""Time limit of starting a daemon."""
END_S = 5.0
"""How long a daemon that is to quit may take, before it is killed."""
LOOK_S = 0.05
"""Interval of looks whether a daemon has ended, or a server has started."""
TERMINATE_S = 5.0
"""Time limit of ending a client's work on the GPU."""
PROBE_S = 5.0
"""Time limit of the probe: cuInit hangs for ever if the server is wedged."""
PROBE = (
    sys.executable,
    "-ISc",
    "import ctypes, sys; sys.exit(ctypes.CDLL('libcuda.so.1').cuInit(0))",
)
PROGRAM = "nvidia-cuda-mps-control"
PIPES = "pipe"
SOCKET = "control"
PID_FILE = "nvidia-cuda-mps-control.pid"
MOST_PATH = 107
"""With a longer path of its socket the daemon fails, and logs nothing."""

_CREDENTIALS = struct.Struct("3i")


class MpsControl:
    def __init__(self, directory: Path, program: Sequence[str], proc: Path) -> None:
        self.program = tuple(program)
        self.proc = proc
        self.directory = directory
        self.pipes = directory / PIPES
        self.logs = directory / "log"
        self.socket = self.pipes / SOCKET

    @property
    def environment(self) -> dict[str, str]:
        return {PIPE_VARIABLE: str(self.pipes), LOG_VARIABLE: str(self.logs)}

    async def start(self, environment: Mapping[str, str], *options: str) -> None:
        """Raises UnavailableError if the daemon does not come up."""
        try:
            await asyncio.to_thread(self._make_directories)
        except OSError as error:
            raise UnavailableError(f"{error.filename}: {error.strerror}") from error
        code, _ = await execute(
            (*self.program, "-d", *options), self.environment | dict(environment), START_S
        )
        if code:
            raise UnavailableError(
                f"{self.program[0]} -d ended with code {code}: see {self.logs / 'control.log'}"
            )

    async def send(self, command: str, limit_s: float = COMMAND_S) -> str:
        """Return what a command of version 2 prints.

        Raises UnseenError, or UnavailableError if it fails. A link that a container made could lead
        to the daemon of another one.
        """
        if await asyncio.to_thread(self.socket.is_symlink):
            raise UnavailableError(f"MPS: {self.socket} is a link, which a program has made")
        code, output = await execute(self.program, self.environment, limit_s, f"{command}\n")
        if code:
            raise UnavailableError(f"MPS: {command.split(maxsplit=1)[0]}: {output.strip()[:200]}")
        return output

    async def call(self, *words: str, limit_s: float = COMMAND_S) -> str:
        """Return what a command of version 3 prints.

        Raises UnseenError, or UnavailableError if it fails.
        """
        code, output = await execute(
            (*self.program, *words), self.environment, limit_s, reads_errors=True
        )
        if code:
            raise UnavailableError(f"MPS: {' '.join(words[:2])}: {output.strip()[:200]}")
        return output

    async def probe(self, command: Sequence[str], pipes: Path, limit_s: float) -> int:
        """Initialise CUDA; return the exit code. Raises WedgedError if the client hangs."""
        try:
            code, _ = await execute(command, {PIPE_VARIABLE: str(pipes)}, limit_s)
        except SilentError as error:
            raise WedgedError(f"a new client hung for {limit_s:g} s") from error
        return code

    async def end(self) -> int:
        """Return how many processes had to be killed."""
        await self._await_end()
        killed = await asyncio.to_thread(self.kill_all)
        await self._await_end()
        return killed

    async def _await_end(self) -> None:
        until = time.monotonic() + END_S
        while await asyncio.to_thread(self.listener) and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)

    def kill_all(self) -> int:
        """Return how many processes were killed.

        Clients do not have the directory of the daemon's logs in their environment.
        """
        mark = f"{LOG_VARIABLE}={self.logs}".encode()
        count = 0
        for directory in self.proc.glob("[0-9]*"):
            try:
                if mark in (directory / "environ").read_bytes().split(b"\0"):
                    os.kill(int(directory.name), signal.SIGKILL)
                    count += 1
            except OSError:
                continue  # it has ended, or is not of this node
        return count

    def read_pid(self) -> int:
        """Return 0 without a PID; the container can write there, too."""
        with contextlib.suppress(OSError, ValueError):
            file = open_checked(self.pipes / PID_FILE, os.O_RDONLY | os.O_CLOEXEC, irregular)
            if isinstance(file, int):
                with open(file, "rb") as opened:  # noqa: PTH123 - a descriptor
                    return int(opened.read(32))
        return 0

    def listener(self) -> int:
        """Return the PID of the listening process, or 0.

        No link is followed. Raises UnseenError if that cannot be seen now.
        """
        try:
            with self._open_socket() as path, socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(COMMAND_S)
                connection.connect(path)
                size = _CREDENTIALS.size
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        except (FileNotFoundError, ConnectionRefusedError):  # a link, too, refuses
            return 0
        except OSError as error:
            raise UnseenError(f"MPS: {self.socket}: {error.strerror or error}") from error
        return int(_CREDENTIALS.unpack(credentials)[0])

    @contextlib.contextmanager
    def _open_socket(self) -> Iterator[str]:
        """Yield a path of what is there now, whatever a container makes in its place."""
        handle = os.open(self.socket, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{handle}"
        finally:
            os.close(handle)

    def remove(self) -> None:
        """Remove the record last. Raises UnavailableError if some is left."""
        for directory in (self.pipes, self.logs, self.directory):
            try:
                remove_tree(directory)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise UnavailableError(f"{directory} is not removed: {error.strerror}") from error

    def _make_directories(self) -> None:
        for directory in (self.pipes, self.logs):
            directory.mkdir(parents=True, exist_ok=True)
        for left in self.pipes.iterdir():  # a container may have the directory itself mounted
            if left.is_dir() and not left.is_symlink():
                remove_tree(left)
            else:
                left.unlink()
        self.pipes.chmod(0o755)  # the container's programs may be of any user
        self.logs.chmod(0o700)


@contextlib.contextmanager
def ending_work_of(client: int) -> Iterator[None]:
    """Raise WedgedError if the command within does not return within its `TERMINATE_S`."""
    try:
        yield
    except SilentError as error:
        raise WedgedError(
            f"ending the GPU work of process {client} did not return within {TERMINATE_S:g} s"
        ) from error
