"""Processes that outlived their supervisor: found by the mark in their environment, and ended.

Children are told by the kernel to die with the supervisor (Linux); what they had started
themselves is not, and carries the mark, too.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from services.cli.state_dir import MARK, StateDir

_PR_SET_PDEATHSIG = 1


def leftovers(directory: StateDir) -> list[int]:
    """Return the processes marked with this state directory, our own one excepted."""
    mark = f"{MARK}={directory.root}".encode()
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


def end_leftovers(directory: StateDir, *, patience_s: float = 5.0) -> int:
    """Kill what is left over and return how many processes that were."""
    ended: set[int] = set()
    until = time.monotonic() + patience_s
    while time.monotonic() < until and (pids := leftovers(directory)):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        ended.update(pids)
        time.sleep(0.02)
    return len(ended)


def dies_with_us() -> Callable[[], None]:
    """Return what a child calls before it becomes its program: the kernel kills it with us.

    The library is loaded here, since a child between fork and exec should do as little as
    possible.
    """
    if not sys.platform.startswith("linux"):
        return lambda: None
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def ask_kernel() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the kernel knew
            os._exit(1)

    return ask_kernel
