"""`leasehold down`: ends what `up` started, and waits for it."""

import contextlib
import os
import signal
import time

from services.cli.state_dir import StateDir, holder
from services.cli.up.orphans import end_leftovers

PATIENCE_S = 30.0


def down(directory: StateDir) -> int:
    """End the supervisor and everything under it; return the exit code."""
    if not directory.root.is_dir():
        print(f"nothing to end: there is no {directory.root}")
        return 0
    pid = holder(directory)
    if pid is not None:
        _end(directory, pid)
    ended = end_leftovers(directory)
    if pid is None and not ended:
        print(f"nothing runs in {directory.root}")
        return 0
    print("stopped; nothing is left running")
    return 0


def _end(directory: StateDir, pid: int) -> None:
    for number, patience_s in ((signal.SIGTERM, PATIENCE_S), (signal.SIGKILL, 5.0)):
        if pid > 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        until = time.monotonic() + patience_s
        while time.monotonic() < until:
            if holder(directory) is None:
                return
            time.sleep(0.05)
