"""Writes a container's region before it starts, and its limits while it runs.

A fresh region is drafted in the parent directory, which no container can write to, and renamed in
one step. The file is left sparse, as the library itself leaves it: two megabytes to its readers,
some kilobytes on disk.

Of a region in use only the limits and their switch are written. Amounts of memory hold from the
container's next allocation on, core limits for processes that start later, the switch within a
fraction of a second. Each field is one aligned write, which a process that has the file mapped sees
whole.
"""

import os
import stat
import threading
from pathlib import Path, PurePath

from services.node_agent.isolation.region import Region, Tampered
from services.node_agent.isolation.region_image import (
    RegionSeed,
    corrections_of,
    image_of,
    pieces_of,
)
from services.node_agent.isolation.region_layouts import V1_2
from services.node_agent.isolation.region_reader import open_region, read_region
from shared.dialects.dialect import ContainerSetup
from shared.dialects.hami_core import OVERRIDES, overrides
from shared.model.errors import UnavailableError

MODE = 0o666
"""The container's processes may run as any user."""


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


def write_limits(path: PurePath, seed: RegionSeed) -> bool:
    """Write the limits of a region in use, in fields that differ; return whether there were any.

    While a limit is below what is in use, the container cannot even query its memory.
    Raises UnavailableError if there is no region.
    """
    region = read_region(path)
    if not isinstance(region, Region):
        raise _unusable(path, region)
    corrections = list(corrections_of(region, seed))
    if not corrections:
        return False
    descriptor = open_region(path, os.O_RDWR)
    if not isinstance(descriptor, int):
        raise _unusable(path, descriptor)
    try:
        for at, piece, _ in corrections:
            os.pwrite(descriptor, piece, at)
    except OSError as error:
        raise UnavailableError(f"the region {path}: {error.strerror}") from error
    finally:
        os.close(descriptor)
    return True


def _unusable(path: PurePath, found: Tampered | None) -> UnavailableError:
    reason = "it does not exist" if found is None else found.reason
    return UnavailableError(f"the region {path}: {reason}")


def seed_region(path: PurePath, seed: RegionSeed, *, starting: bool) -> bool:
    """Ensure a region with these limits, verified byte for byte; return whether it was changed.

    `starting` means that no process of the container runs: an earlier region is replaced, since
    pids of ended processes would be mistaken for new ones. Otherwise a region in use keeps its file
    and its processes, and its limits are written again.
    Raises UnavailableError naming the file and what is wrong: the container must not start.
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
