"""`leasehold down`, and the processes that outlive their supervisor.

On Linux the kernel kills the supervisor's children with it, and not their own children: the
environment variable LEASEHOLD_SUPERVISED marks these.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

from services.cli.local_commands import Down
from services.cli.state_dir import SUPERVISED_VARIABLE, StateDir, supervisor_pid

TERMINATE_S = 30.0
"""How long processes may take to end after SIGTERM: agents wait for containers to start."""
KILL_S = 5.0
"""How long processes may take to disappear after SIGKILL."""


def down(flags: Down) -> int:
    directory = StateDir.found(flags.state)
    if not directory.root.is_dir():
        print(f"nothing to stop: there is no {directory.root}")
        return 0
    pid = supervisor_pid(directory)
    if pid is not None:
        _stop_supervisor(directory, pid)
    killed = kill_leftovers(directory)
    if pid is None and not killed:
        print(f"nothing runs in {directory.root}")
        return 0
    print(f"stopped {directory.root}; nothing is left running")
    return 0


def _stop_supervisor(directory: StateDir, pid: int) -> None:
    for number, timeout_s in ((signal.SIGTERM, TERMINATE_S), (signal.SIGKILL, KILL_S)):
        if pid > 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if supervisor_pid(directory) is None:
                return
            time.sleep(0.05)


def leftovers(directory: StateDir) -> list[int]:
    marker = f"{SUPERVISED_VARIABLE}={directory.root}".encode()
    pids: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if marker in (entry / "environ").read_bytes().split(b"\0"):
                pids.append(int(entry.name))
    return [pid for pid in pids if pid != os.getpid()]


def kill_leftovers(directory: StateDir, *, timeout_s: float = KILL_S) -> int:
    killed: set[int] = set()
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and (pids := leftovers(directory)):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed.update(pids)
        time.sleep(0.02)
    return len(killed)
