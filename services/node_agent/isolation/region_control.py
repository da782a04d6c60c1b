"""Changes of limits in a region in use; nothing else of it is touched.

Amounts of memory hold from the container's next allocation on, core limits for processes that start
later, the switch within a fraction of a second. Each field is one aligned write, which a process
that has the file mapped sees whole.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path

from services.node_agent.isolation.region import Region, RegionPath, Tampered
from services.node_agent.isolation.region_image import SWITCH_ON, RegionSeed
from services.node_agent.isolation.region_layouts import DEVICES, RegionLayout
from services.node_agent.isolation.region_reader import open_region, read_region
from shared.dialects.dialect import ContainerSetup
from shared.dialects.hami_core import OVERRIDES, overrides
from shared.model.errors import UnavailableError


def write_overrides(setup: ContainerSetup) -> None:
    """Write the container's variables that set limits, if it mounts such a file.

    An existing file is changed in place, since a running container has it mounted. One write
    replaces all of it: what an older content had more becomes empty lines, which end it.
    Raises OSError.
    """
    for path in (Path(one.host_path) for one in setup.mounts if one.container_path == OVERRIDES):
        content = overrides(setup.environment).encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            before = os.fstat(descriptor).st_size
            os.pwrite(descriptor, content.ljust(before, b"\n"), 0)
            os.ftruncate(descriptor, len(content))
        finally:
            os.close(descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionChanges:
    """New values of fields; None leaves a field unchanged."""

    memory_limits: tuple[int, ...] | None = None
    """Bytes, for all 16 positions; 0 is no limit."""
    core_limits: tuple[int, ...] | None = None
    """Percent, for all 16 positions."""
    utilization_switch: int | None = None
    recent_kernel: int | None = None
    """-1 blocks launches of a container with core limits, 0 allows them."""


def write_changes(path: RegionPath, changes: RegionChanges) -> None:
    """Change a region in use. Fields that already have their value are not written.

    While a limit is below what is in use, the container cannot even query its memory.
    Raises UnavailableError if there is no region.
    """
    region = read_region(path)
    if not isinstance(region, Region):
        raise UnavailableError(f"{_named(path)}: {_missing(region)}")
    pieces = _pieces(region, changes)
    if not pieces:
        return
    descriptor = open_region(path, os.O_RDWR)
    if not isinstance(descriptor, int):
        raise UnavailableError(f"{_named(path)}: {_missing(descriptor)}")
    try:
        for at, piece in pieces.items():
            os.pwrite(descriptor, piece, at)
    except OSError as error:
        raise UnavailableError(f"{_named(path)}: {error.strerror}") from error
    finally:
        os.close(descriptor)


def restore_limits(path: RegionPath, seed: RegionSeed) -> None:
    """Write the limits that a region in use was made with.

    Raises UnavailableError if there is no region.
    """
    changes = RegionChanges(
        memory_limits=seed.memory_limits, core_limits=seed.core_limits, utilization_switch=SWITCH_ON
    )
    write_changes(path, changes)


def _pieces(region: Region, changes: RegionChanges) -> dict[int, bytes]:
    """Return what differs, by offset: only the words of limits, and the two control fields."""
    layout: RegionLayout = region.layout
    pieces: dict[int, bytes] = {}
    for offset, current, wanted in (
        (layout.memory_limits, region.memory_limits, changes.memory_limits),
        (layout.core_limits, region.core_limits, changes.core_limits),
    ):
        for position in range(DEVICES if wanted is not None else 0):
            if wanted is not None and current[position] != wanted[position]:
                pieces[offset + 8 * position] = struct.pack("<Q", wanted[position])
    if changes.utilization_switch not in {None, region.utilization_switch}:
        pieces[layout.switch] = struct.pack("<i", changes.utilization_switch)
    if changes.recent_kernel not in {None, region.recent_kernel}:
        pieces[layout.recent_kernel] = struct.pack("<i", changes.recent_kernel)
    return pieces


def _named(path: RegionPath) -> str:
    return f"the region {path.directory}/{path.name}"


def _missing(found: Tampered | None) -> str:
    return "it does not exist" if found is None else found.reason
