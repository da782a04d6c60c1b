"""The pods' cgroups of a machine with version 1, shown as a tree of version 2.

The simulated driver's limits need a tree with files of the controller `dmem`, and the agent needs
processes with one cgroup each. Both are made here from the memory controller's hierarchy; the hook
makes its own container's before it calls the agent (`hook`).
"""

import asyncio
import contextlib
import os
import shutil
from pathlib import Path

from tests.support.cgroups import CONTROLLERS, CgroupTree

MEMORY = Path("/sys/fs/cgroup/memory")
KUBEPODS = "kubepods"
LOOK_S = 0.02
HOOK = """#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
state=$(cat)
pid=$(printf %s "$state" | sed -n 's/.*"pid": *\\([0-9]*\\).*/\\1/p')
path=$(sed -n 's/^[0-9]*:memory://p' "/proc/$pid/cgroup")
mkdir -p "{root}$path" "{proc}/$pid"
echo "{controllers}" > "{root}$path/cgroup.subtree_control"
echo "0::$path" > "{proc}/$pid/hooks" && mv "{proc}/$pid/hooks" "{proc}/$pid/cgroup"
printf %s "$state" | {program} "$@"
"""


def hook(program: Path, root: Path, proc: Path) -> str:
    """Return a program that shows a container's cgroup before it calls the product's hook."""
    return HOOK.format(program=program, root=root, proc=proc, controllers=" ".join(CONTROLLERS))


class CgroupMirror:
    def __init__(self, root: Path, proc: Path) -> None:
        self.tree = CgroupTree(root=root)
        self.proc = proc
        self.tree.make(KUBEPODS)
        proc.mkdir()

    async def run(self) -> None:
        while True:
            await asyncio.to_thread(self.update)
            await asyncio.sleep(LOOK_S)

    def update(self) -> None:
        shown = {path.relative_to(self.tree.root) for path in _directories(self.tree.root)}
        present = {path.relative_to(MEMORY) for path in _directories(MEMORY / KUBEPODS)}
        for path in sorted(present - shown):
            self.tree.make(str(path))
        pids = {pid: path for path in present for pid in _processes(MEMORY / path)}
        for pid, path in pids.items():
            file = self.proc / pid / "cgroup"
            if not file.exists():  # the hook may have written it, and the agent reads it
                file.parent.mkdir(exist_ok=True)
                file.with_name("draft").write_text(f"0::/{path}\n")
                file.with_name("draft").rename(file)
        for path in sorted(shown - present - {Path(KUBEPODS)}, reverse=True):
            if not (MEMORY / path).exists():
                shutil.rmtree(self.tree.root / path, ignore_errors=True)
        for place in self.proc.iterdir():
            if not (Path("/proc") / place.name).exists():
                shutil.rmtree(place, ignore_errors=True)


def _directories(root: Path) -> list[Path]:
    return [Path(folder) for folder, _, _ in os.walk(root)]


def _processes(path: Path) -> list[str]:
    with contextlib.suppress(OSError):  # its container has ended
        return (path / "cgroup.procs").read_text().split()
    return []
