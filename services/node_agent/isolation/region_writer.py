"""Writes a container's region before it starts, and its limits while it runs.

A fresh region is drafted in the parent directory, which no container can write to. Limits of memory
hold from the container's next allocation on, of cores for processes that start later. Each field is
one aligned write, which a process that has the file mapped sees whole.
"""

import contextlib
import os
import stat
import struct
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath

from services.node_agent.isolation.region import InvalidRegion, Region, Slot
from services.node_agent.isolation.region_image import (
    RegionSeed,
    corrections_of,
    image_of,
    pieces_of,
)
from services.node_agent.isolation.region_layouts import V1_2, RegionLayout
from services.node_agent.isolation.region_reader import open_region, read_region
from shared.dialects.dialect import ContainerSetup
from shared.dialects.hami_core import OVERRIDES, overrides
from shared.model.errors import UnavailableError

MODE = 0o666
TRIES = 5
_I32 = struct.Struct("<i")
_U64 = struct.Struct("<Q")
_USED = struct.Struct("<5Q")


def write_overrides(setup: ContainerSetup) -> None:
    """Write the container's variables that set limits, if it mounts such a file.

    A running container has the file mounted, so it is changed in place. Raises OSError.
    """
    for path in (
        Path(mount.host_path) for mount in setup.mounts if mount.container_path == OVERRIDES
    ):
        content = overrides(setup.environment).encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            before = os.fstat(descriptor).st_size
            os.pwrite(descriptor, content.ljust(before, b"\n"), 0)
            os.ftruncate(descriptor, len(content))
        finally:
            os.close(descriptor)


def write_limits(path: PurePath, seed: RegionSeed) -> bool:
    """While a limit is below what is in use, the container cannot even query its memory.

    Raises UnavailableError if there is no region.
    """
    region = read_region(path)
    if not isinstance(region, Region):
        raise _unusable(path, region)
    corrections = list(corrections_of(region, seed))
    if not corrections:
        return False
    with _opened(path) as descriptor:
        for at, piece, _ in corrections:
            os.pwrite(descriptor, piece, at)
    return True


def identify(
    path: PurePath, layout: RegionLayout, slot: Slot, host_pid: int, contexts: Mapping[int, int]
) -> None:
    """`contexts` are bytes by the device's position.

    Raises UnavailableError if there is no region.
    """
    at = layout.slot_at(slot.index)
    with _opened(path) as descriptor:
        if os.pread(descriptor, _I32.size, at) != _I32.pack(slot.pid):
            return  # it has ended, or its record was moved: the next scan finds it
        os.pwrite(descriptor, _I32.pack(host_pid), at + _I32.size)
        for position, amount in contexts.items():
            used = at + layout.slot.used + position * layout.slot.used_size
            _count_context(descriptor, used, amount)


def _count_context(descriptor: int, at: int, amount: int) -> None:
    """A process adds and subtracts what it allocates itself.

    If it does so while the total is written here, the difference from the kinds shows it, and the
    total is written again.
    """
    counted, *kinds, total = _USED.unpack(os.pread(descriptor, _USED.size, at))
    if counted:
        return
    beside = total - sum(kinds)
    os.pwrite(descriptor, _U64.pack(amount), at)
    for _ in range(TRIES):
        context, *kinds, total = _USED.unpack(os.pread(descriptor, _USED.size, at))
        wanted = beside + context + sum(kinds)
        if total == wanted or not 0 <= wanted < 1 << 64:
            return
        os.pwrite(descriptor, _U64.pack(wanted), at + _USED.size - _U64.size)


@contextlib.contextmanager
def _opened(path: PurePath) -> Iterator[int]:
    descriptor = open_region(path, os.O_RDWR)
    if not isinstance(descriptor, int):
        raise _unusable(path, descriptor)
    try:
        yield descriptor
    except OSError as error:
        raise UnavailableError(f"the region {path}: {error.strerror}") from error
    except struct.error as error:
        raise UnavailableError(f"the region {path}: its container has made it shorter") from error
    finally:
        os.close(descriptor)


def _unusable(path: PurePath, problem: InvalidRegion | None) -> UnavailableError:
    reason = "it does not exist" if problem is None else problem.reason
    return UnavailableError(f"the region {path}: {reason}")


def seed_region(path: PurePath, seed: RegionSeed, *, starting: bool) -> bool:
    """Ensure a region with these limits, verified byte for byte; return whether it was changed.

    If no process of the container runs (`starting`), an earlier region is replaced, since PIDs of
    ended processes would be mistaken for new ones. Raises UnavailableError.
    """
    if not starting and isinstance(read_region(path), Region):
        return write_limits(path, seed)
    image = image_of(seed)
    if _holds(path, image):
        return False
    try:
        _replace(path, seed)
    except OSError as error:
        raise UnavailableError(
            f"the limits of the container cannot be set: {path}: {error.strerror}"
        ) from error
    if not _holds(path, image):
        raise UnavailableError(
            f"the limits of the container cannot be set: {path} does not have the content that was "
            "written to it; check the disk, and what else writes there"
        )
    return True


def _replace(path: PurePath, seed: RegionSeed) -> None:
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        own = f".{path.parent.name}.seed-{os.getpid()}-{threading.get_ident()}"
        draft = Path(path.parent.with_name(own))
        draft.unlink(missing_ok=True)
        _write(draft, seed)
        os.rename(draft, path.name, dst_dir_fd=directory)
    finally:
        os.close(directory)


def _write(draft: Path, seed: RegionSeed) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    descriptor = os.open(draft, flags, 0o600)
    try:
        os.ftruncate(descriptor, V1_2.file_size)
        for at, piece in pieces_of(seed).items():
            os.pwrite(descriptor, piece, at)
        os.fchmod(descriptor, MODE)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _holds(path: PurePath, image: bytes) -> bool:
    descriptor = open_region(path, os.O_RDONLY)
    if not isinstance(descriptor, int):
        return False
    try:
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        return mode == MODE and os.pread(descriptor, len(image) + 1, 0) == image
    except OSError:
        return False
    finally:
        os.close(descriptor)
