"""Runs programs of the GPUs' driver: a process for each call, with a time limit."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence

from shared.model.errors import UnavailableError

KILL_S = 1.0
"""How long a killed program may take to end: one that sleeps in the driver is left there."""


class SilentError(UnavailableError):
    """A program did not end within its time limit, and was killed."""


async def execute(
    command: Sequence[str],
    environment: Mapping[str, str],
    limit_s: float,
    text: str = "",
    *,
    reads_errors: bool = False,
) -> tuple[int, str]:
    """Run a program; return its exit code and output. Raises SilentError after the limit.

    A daemon that it starts must not keep the pipe of the output, so without `text` there is none,
    unless its errors are to be read, too.
    """
    pipe = asyncio.subprocess.PIPE
    nothing = asyncio.subprocess.DEVNULL
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            env={**_own_environment(), **environment},
            stdin=pipe if text else nothing,
            stdout=pipe if text or reads_errors else nothing,
            stderr=asyncio.subprocess.STDOUT if reads_errors else nothing,
            start_new_session=True,
        )
    except OSError as error:
        raise UnavailableError(f"{command[0]} cannot be started: {error.strerror}") from error
    try:
        async with asyncio.timeout(limit_s):
            output, _ = await process.communicate(text.encode() or None)
    except TimeoutError as error:
        raise SilentError(
            f"{command[0]} {text.strip() or command[-1]} did not end within {limit_s:g} s"
        ) from error
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what it has started
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KILL_S):
                    await process.wait()
    return process.returncode or 0, (output or b"").decode(errors="replace")


def _own_environment() -> dict[str, str]:
    """Return what a program of the driver needs of this process's environment."""
    names = ("PATH", "LD_LIBRARY_PATH", "GPU_DRIVER_STATE")
    return {name: os.environ[name] for name in names if name in os.environ}
