"""A command on a terminal of its own: what it draws, which keys it gets, how it leaves it."""

import asyncio
import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from tests.support.waiting import until

CONTROL_C = b"\x03"
ALTERNATE_SCREEN = "\x1b[?1049h"
MAIN_SCREEN = "\x1b[?1049l"
SHOW_CURSOR = "\x1b[?25h"
_ON_TERMINAL = (
    "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGINT, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])"
)


@dataclass
class PseudoTerminal:
    """A running command and its terminal."""

    process: subprocess.Popen[bytes]
    master: int
    slave: int
    output: str = ""

    def modes(self) -> list[object]:
        """Return the terminal's modes, which a program may change."""
        return list(termios.tcgetattr(self.slave))

    def press(self, keys: bytes) -> None:
        """Type."""
        os.write(self.master, keys)

    async def end(self) -> int:
        """Wait for the command's end; return its exit code."""
        code: int = await until(self.process.poll, lambda code: code is not None)
        self.read()
        return code

    def read(self) -> str:
        """Take what the command has written; return everything so far."""
        with contextlib.suppress(BlockingIOError, OSError):
            while data := os.read(self.master, 65536):
                self.output += data.decode(errors="replace")
        return self.output


@contextlib.asynccontextmanager
async def on_terminal(
    command: Sequence[str], env: Mapping[str, str], *, columns: int = 160, rows: int = 40
) -> AsyncIterator[PseudoTerminal]:
    """Run a command as the only one of a terminal, and kill it at the end."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    os.set_blocking(master, False)
    sized_otherwise = {"COLUMNS", "LINES"}
    inherited = {key: value for key, value in env.items() if key not in sized_otherwise}
    process = subprocess.Popen(
        [sys.executable, "-c", _ON_TERMINAL, *command],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env={"TERM": "xterm-256color", **inherited},
    )
    try:
        yield PseudoTerminal(process, master, slave)
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)
        os.close(master)
        os.close(slave)
