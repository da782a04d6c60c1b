"""A part's wall clock is shifted while it runs, and its monotonic clock is not."""

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.campaign.stack.clocks import Clocks

SHOW = """
import sys, time
for line in sys.stdin:
    print(time.time(), time.monotonic(), flush=True)
"""


def test_a_running_process_sees_its_clock_move(tmp_path: Path) -> None:
    clocks = Clocks(tmp_path)
    environment = {**os.environ, **clocks.environment("binder")}
    command = (sys.executable, "-c", SHOW)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:  # type: ignore[call-overload]

        def offsets() -> tuple[float, float]:
            process.stdin.write("\n")
            process.stdin.flush()
            wall, monotonic = map(float, process.stdout.readline().split())
            return wall - time.time(), monotonic - time.monotonic()

        found = [offsets()]
        for offset_s in (3600.0, -45.0, 0.0):
            clocks.shift("binder", offset_s)
            found.append(offsets())
        process.stdin.close()

    assert [round(wall) for wall, _ in found] == [0, 3600, -45, 0]
    assert all(abs(monotonic) < 1 for _, monotonic in found)
