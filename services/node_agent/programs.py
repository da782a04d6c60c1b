"""Runs programs of the GPUs' driver: a process for each call, with a time limit."""

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import IO

from shared.model.errors import UnavailableError

KILL_S = 1.0
"""How long a killed program may take to end: one that sleeps in the driver is left there."""

MOST_OUTPUT = 16 << 20
"""A list of 60 clients of MPS has their command lines, of up to 128 KiB an argument."""
READ_BYTES = 65_536

_WAITS = ThreadPoolExecutor(max_workers=32, thread_name_prefix="program")


class UnseenError(UnavailableError):
    """A program has said nothing of what it was asked."""


class SilentError(UnseenError):
    """A program did not end within its time limit, and was killed."""


async def execute(
    command: Sequence[str],
    environment: Mapping[str, str],
    limit_s: float,
    text: str = "",
    *,
    reads_errors: bool = False,
) -> tuple[int, str]:
    """Raises SilentError after the limit, UnseenError if it cannot be started or prints too much.

    A daemon that it starts must not keep the pipe of the output, so without `text` there is none,
    unless its errors are to be read, too.
    """
    wait = partial(asyncio.get_running_loop().run_in_executor, _WAITS)
    process = _spawn(command, environment, has_input=bool(text), reads_errors=reads_errors)
    try:
        output = await wait(_communicate, process, text.encode(), limit_s)
    except subprocess.TimeoutExpired as error:
        raise SilentError(
            f"{command[0]} {text.strip() or command[-1]} did not end within {limit_s:g} s"
        ) from error
    finally:
        _kill(process)  # if this is cancelled
    return process.returncode, output.decode(errors="replace")


def _communicate(process: subprocess.Popen[bytes], text: bytes, limit_s: float) -> bytes:
    until = time.monotonic() + limit_s
    try:
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(text)
            process.stdin.close()
        output = b"" if process.stdout is None else _read(process, process.stdout, until)
        process.wait(max(0.0, until - time.monotonic()))
    finally:
        _kill(process)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_S)
    return output


def _read(process: subprocess.Popen[bytes], pipe: IO[bytes], until: float) -> bytes:
    readable = select.poll()
    readable.register(pipe, select.POLLIN)
    output = bytearray()
    while len(output) <= MOST_OUTPUT:
        left_s = until - time.monotonic()
        if left_s <= 0 or not readable.poll(left_s * 1000):
            raise subprocess.TimeoutExpired(process.args, left_s)
        part = pipe.read(READ_BYTES)
        if not part:
            return bytes(output)
        output += part
    raise UnseenError(f"a program prints more than {MOST_OUTPUT} bytes, and was killed")


def _spawn(
    command: Sequence[str], environment: Mapping[str, str], *, has_input: bool, reads_errors: bool
) -> subprocess.Popen[bytes]:
    """The event loop's fork is not used: gRPC's handlers can crash in it."""
    nothing = subprocess.DEVNULL
    try:
        return subprocess.Popen(  # noqa: S603 - the driver's program, with our own arguments
            command,
            env={**_own_environment(), **environment},
            stdin=subprocess.PIPE if has_input else nothing,
            stdout=subprocess.PIPE if has_input or reads_errors else nothing,
            stderr=subprocess.STDOUT if reads_errors else nothing,
            start_new_session=True,
            bufsize=0,
        )
    except OSError as error:
        raise UnseenError(f"{command[0]} cannot be started: {error.strerror}") from error


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _own_environment() -> dict[str, str]:
    """With what marks processes of `leasehold up`, a daemon ends with it."""
    names = ("PATH", "LD_LIBRARY_PATH", "GPU_DRIVER_STATE", "LEASEHOLD_SUPERVISED")
    return {name: os.environ[name] for name in names if name in os.environ}
