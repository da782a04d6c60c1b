"""The driver's own limits of memory, of cgroups; they need the driver R615 and cgroups version 2.

Programs run in a cgroup that is made for these tests, below the root, and that has the limit.
"""

import asyncio
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from services.node_agent.gpus.memory_limits import (
    UNLIMITED,
    Accounting,
    LimitError,
    LimitFault,
    MemoryLimit,
)
from services.node_agent.gpus.nvml.memory_limits import NvmlMemoryLimits
from services.node_agent.memory_limits import cgroup_tree
from services.node_agent.memory_limits.limit_trial import try_limits
from shared.model.errors import UnavailableError
from tests.hardware.conftest import Add
from tests.hardware.machine import Machine
from tests.support.cgroups import CgroupTree
from tests.support.gpu_driver import MIB, GpuLoad

LIMIT = 4096
MORE = LIMIT + 512
WAYS = ("alloc", "managed", "pitch", "async", "create")
REAL_WAYS = ("pool", "graph", "direct")
"""By own memory pools, by nodes of graphs, and past everything that replaces the functions."""
STARTS = 100
QUICK_STARTS = 3
ENTER = 'echo $$ > "$0/cgroup.procs" && exec "$1"'


@dataclass(kw_only=True)
class LimitedCgroup:
    machine: Machine
    path: Path
    accounting: Accounting
    loads: list[GpuLoad] = field(default_factory=list)

    def set(self, mib: int) -> None:
        self._set(mib * MIB)

    def get(self) -> MemoryLimit:
        return asyncio.run(NvmlMemoryLimits().get(self.machine.gpu.uuid, self.path))

    def load(self) -> GpuLoad:
        """Start a program in the cgroup; all its instructions are run there."""
        machine = self.machine
        if machine.driver:
            self.loads.append(machine.load(GPU_DRIVER_CGROUP=str(self.path)))
        else:
            program = machine.folder / "gpu-load"
            self.loads.append(machine.load("sh", "-c", ENTER, self.path, program))
        return self.loads[-1]

    def close(self) -> None:
        for load in self.loads:
            if load.process.returncode is None:
                load.kill()
        self._set(UNLIMITED)
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def _set(self, hard_bytes: int) -> None:
        asyncio.run(NvmlMemoryLimits().set(self.machine.gpu.uuid, self.path, hard_bytes))


@pytest.fixture
def cgroup(machine: Machine) -> Iterator[LimitedCgroup]:
    root = cgroup_tree.CGROUPS
    if machine.driver:
        root = machine.root / "cgroup"
        CgroupTree(root=root).make()
        machine.driver.limit_cgroups("dmem")
    tree = cgroup_tree.CgroupTree(root)
    try:
        accounting = asyncio.run(try_limits(NvmlMemoryLimits(), tree, machine.gpu.uuid))
    except LimitError as error:
        if error.fault is not LimitFault.TOO_OLD:
            raise
        pytest.skip("it needs the driver R615")
    except UnavailableError as error:
        pytest.skip(str(error))
    path = root / f"leasehold-test-{os.getpid()}"
    if machine.driver:
        CgroupTree(root=root).make(path.name)
    else:
        path.mkdir()
    made = LimitedCgroup(machine=machine, path=path, accounting=accounting)
    made.set(LIMIT)
    yield made
    made.close()


def test_how_the_driver_counts(cgroup: LimitedCgroup, seen: Add) -> None:
    seen("the driver limits the memory of cgroups by", cgroup.accounting)


def test_memory_by_each_way(cgroup: LimitedCgroup, seen: Add) -> None:
    for way in WAYS + (REAL_WAYS if cgroup.machine.real else ()):
        load = cgroup.load()
        given = load.value(f"fill {way} {MORE}", "mib")
        used = cgroup.get().used_bytes // MIB
        load.kill()
        figure = f"{given}; {used} are counted"
        seen(f"MiB given by `{way}`", figure, f"at most {LIMIT}", holds=max(given, used) <= LIMIT)


def test_what_a_program_sees(cgroup: LimitedCgroup, seen: Add) -> None:
    load = cgroup.load()

    seen("MiB of the GPU, by CUDA", load.value("info", "total") // MIB, LIMIT)
    seen("MiB of the GPU, by NVML", load.value("nvml", "total") // MIB, LIMIT)


def test_the_limit_is_changed_while_a_program_runs(cgroup: LimitedCgroup, seen: Add) -> None:
    load = cgroup.load()
    before = load.value(f"fill alloc {MORE}", "mib")
    cgroup.set(2 * LIMIT)
    raised = load.fits(f"{LIMIT}m")
    seen("MiB more after the limit was raised from 4096 to 8192", LIMIT if raised else 0, LIMIT)

    try:
        cgroup.set(before // 2)
        answer = "success"
    except LimitError as error:
        answer = str(error)
    held = cgroup.get().hard_bytes // MIB
    seen("a limit below what is in use: the driver reports", f"{answer}; {held} MiB is its limit")


def test_the_first_allocation_of_a_program_is_limited(cgroup: LimitedCgroup, seen: Add) -> None:
    size = f"{cgroup.machine.gpu.usable_mib * 9 // 10}m"
    starts = QUICK_STARTS if cgroup.machine.quick else STARTS
    refused = 0
    for _ in range(starts):
        load = cgroup.load()
        refused += not load.fits(size)
        load.kill()

    seen("programs whose first call for 90 % of the GPU is refused", refused, starts)
