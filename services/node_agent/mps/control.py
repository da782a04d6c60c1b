"""Starts a control daemon of MPS, and sends it commands: a process for each, with a time limit.

https://docs.nvidia.com/deploy/mps/latest/mpsv2-interface.html (version 2 of the protocol, which all
drivers from R495 on speak).
"""

import asyncio
import os
import shutil
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from services.node_agent.programs import execute
from shared.dialects.mps import LOG_VARIABLE, PIPE_VARIABLE
from shared.model.errors import UnavailableError

COMMAND_S = 10.0
"""Time limit of a command: a daemon that is well replies within milliseconds."""
START_S = 20.0
"""Time limit of starting a daemon."""
PROGRAM = "nvidia-cuda-mps-control"
SOCKET = "control"
PID_FILE = "nvidia-cuda-mps-control.pid"
MOST_PATH = 107
"""Bytes of a Unix socket's path. With a longer one the daemon fails, and logs nothing."""

_CREDENTIALS = struct.Struct("3i")


class MpsControl:
    """The daemon of one directory."""

    def __init__(self, directory: Path, program: Sequence[str]) -> None:
        self.program = tuple(program)
        self.pipes = directory / "pipe"
        self.logs = directory / "log"

    @property
    def environment(self) -> dict[str, str]:
        return {PIPE_VARIABLE: str(self.pipes), LOG_VARIABLE: str(self.logs)}

    async def start(self, environment: Mapping[str, str]) -> None:
        """Start the daemon. Raises UnavailableError if it does not come up."""
        await asyncio.to_thread(self._make_directories)
        code, _ = await execute(
            (*self.program, "-d"), self.environment | dict(environment), START_S
        )
        if code:
            raise UnavailableError(
                f"{self.program[0]} -d ended with code {code}: see {self.logs / 'control.log'}"
            )

    async def send(self, command: str, limit_s: float = COMMAND_S) -> str:
        """Return what a command prints. Raises SilentError, or UnavailableError if it fails."""
        code, output = await execute(self.program, self.environment, limit_s, f"{command}\n")
        if code:
            raise UnavailableError(f"MPS: {command.split(maxsplit=1)[0]}: {output.strip()[:200]}")
        return output

    def read_pid(self) -> int:
        """Return the PID that the daemon has written, or 0; the container can write there, too."""
        try:
            file = os.open(self.pipes / PID_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return 0
        try:
            return int(os.read(file, 32))
        except (OSError, ValueError):
            return 0
        finally:
            os.close(file)

    def listener(self) -> int:
        """Return the PID of the process that listens at the daemon's socket, or 0."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(COMMAND_S)
            try:
                connection.connect(str(self.pipes / SOCKET))
            except OSError:
                return 0
            size = _CREDENTIALS.size
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return int(_CREDENTIALS.unpack(credentials)[0])

    def _make_directories(self) -> None:
        for directory in (self.pipes, self.logs):
            directory.mkdir(parents=True, exist_ok=True)
        for left in self.pipes.iterdir():  # a container may have the directory itself mounted
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            else:
                left.unlink()
        self.pipes.chmod(0o755)  # the container's programs may be of any user
        self.logs.chmod(0o700)
