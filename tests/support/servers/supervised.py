"""A supervisor of small dummy programs as a process of its own, for `python -m`."""

import asyncio
import os
import signal
import sys
from pathlib import Path

from services.cli.state_dir import StateDir, locked
from services.cli.up.components import Component, RunFileCheck
from services.cli.up.supervisor import Supervisor

STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
WITH_CHILD = "import subprocess; subprocess.Popen(['sleep', '600'])\n"


def dummy(
    directory: StateDir, name: str, *, after: tuple[str, ...] = (), before: str = ""
) -> Component:
    """Return a component that runs `before`, writes its run file and then sleeps."""
    run_file = directory.run_file(name)
    program = (
        f"{before}\nimport json, os, time\n"
        f"draft = {str(run_file)!r} + str(os.getpid())\n"
        "open(draft, 'w').write(json.dumps({'pid': os.getpid(), 'http': '127.0.0.1:1'}))\n"
        f"os.replace(draft, {str(run_file)!r})\n"
        "time.sleep(600)\n"
    )
    return Component(
        name=name,
        argv=(sys.executable, "-c", program),
        after=after,
        checks=(RunFileCheck(path=run_file),),
    )


async def _main(root: Path) -> None:
    directory = StateDir.at(root)
    directory.make()
    components = [
        dummy(directory, "first"),
        dummy(directory, "second", after=("first",), before=WITH_CHILD),
    ]
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

    def ready() -> None:
        os.write(1, b"ready\n")

    with locked(directory):
        supervisor = Supervisor(
            components, directory, report=print, save=lambda states, ready: None
        )
        await supervisor.run(stop, ready)


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1])))
