"""Finds out how a driver limits memory, by a limit on a cgroup of our own without processes.

With `misc`, reading a cgroup that never had a limit fails as if limits were off.
"""

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from services.node_agent.gpus.memory_limits import (
    UNLIMITED,
    Accounting,
    LimitError,
    LimitFault,
)
from services.node_agent.gpus.nvml.memory_limits import NvmlMemoryLimits
from services.node_agent.memory_limits.cgroup_tree import TRIAL, CgroupTree, has_dmem
from shared.model.errors import LeaseholdError, UnavailableError
from shared.model.names import DeviceUuid

TRIAL_BYTES = 1 << 30


async def try_limits(driver: NvmlMemoryLimits, tree: CgroupTree, device: DeviceUuid) -> Accounting:
    """Raises LimitError or UnavailableError with the reason if the driver sets no limits."""
    await _remove_left(driver, tree, device)
    with _own_cgroup(tree.root) as cgroup:
        try:
            before = await driver.get(device, cgroup)
        except LimitError as error:
            if error.fault is not LimitFault.NOT_SUPPORTED:
                raise
            accounting = Accounting.MISC
        else:
            is_dmem = before.is_none and await asyncio.to_thread(has_dmem, cgroup)
            accounting = Accounting.DMEM if is_dmem else Accounting.MISC
        await driver.set(device, cgroup, TRIAL_BYTES)
        after = await driver.get(device, cgroup)
        await driver.set(device, cgroup, UNLIMITED)
    if after.hard_bytes != TRIAL_BYTES:
        raise UnavailableError(
            f"the driver reports success for a limit of {TRIAL_BYTES} bytes, and has "
            f"{after.hard_bytes} after that"
        )
    return accounting


async def _remove_left(driver: NvmlMemoryLimits, tree: CgroupTree, device: DeviceUuid) -> None:
    """A partitioner may have been killed in a trial."""
    for path in await asyncio.to_thread(lambda: list(tree.root.glob(f"{TRIAL}-*"))):
        if path == _own_path(tree.root):
            continue
        with contextlib.suppress(LeaseholdError):  # with `misc`, the limit would stay
            await driver.set(device, path, UNLIMITED)
        with contextlib.suppress(OSError):
            path.rmdir()


def _own_path(root: Path) -> Path:
    return root / f"{TRIAL}-{os.getpid()}"


@contextlib.contextmanager
def _own_cgroup(root: Path) -> Iterator[Path]:
    path = _own_path(root)
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise UnavailableError(
            f"no cgroup can be made in {root} ({error.strerror}): mount the host's /sys/fs/cgroup "
            "there, writable, on a node with cgroups of version 2"
        ) from error
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.rmdir()
