"""Runs programs of the GPUs' driver: a process for each call, with a time limit."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from shared.model.errors import UnavailableError

KILL_S = 1.0
"""How long a killed program may take to end: one that sleeps in the driver is left there."""

_WAITS = ThreadPoolExecutor(max_workers=32, thread_name_prefix="program")
"""Wait for programs: those that hang keep nothing else waiting."""


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
    wait = partial(asyncio.get_running_loop().run_in_executor, _WAITS)
    process = _spawn(command, environment, has_input=bool(text), reads_errors=reads_errors)
    try:
        output, _ = await wait(process.communicate, text.encode() or None, limit_s)
    except subprocess.TimeoutExpired as error:
        _kill(process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            await wait(process.communicate, None, KILL_S)
        raise SilentError(
            f"{command[0]} {text.strip() or command[-1]} did not end within {limit_s:g} s"
        ) from error
    finally:
        _kill(process)  # if this is cancelled
    return process.returncode, (output or b"").decode(errors="replace")


def _spawn(
    command: Sequence[str], environment: Mapping[str, str], *, has_input: bool, reads_errors: bool
) -> subprocess.Popen[bytes]:
    """Start a program, but not by the event loop's fork, in which gRPC's handlers can crash."""
    nothing = subprocess.DEVNULL
    try:
        return subprocess.Popen(  # noqa: S603 - the driver's program, with our own arguments
            command,
            env={**_own_environment(), **environment},
            stdin=subprocess.PIPE if has_input else nothing,
            stdout=subprocess.PIPE if has_input or reads_errors else nothing,
            stderr=subprocess.STDOUT if reads_errors else nothing,
            start_new_session=True,
        )
    except OSError as error:
        raise UnavailableError(f"{command[0]} cannot be started: {error.strerror}") from error


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a program that still runs, with what it has started."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _own_environment() -> dict[str, str]:
    """Return what a program of the driver needs of this process's environment.

    With what marks processes of `leasehold up`, a daemon ends with it.
    """
    names = ("PATH", "LD_LIBRARY_PATH", "GPU_DRIVER_STATE", "LEASEHOLD_SUPERVISED")
    return {name: os.environ[name] for name in names if name in os.environ}
