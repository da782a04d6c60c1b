"""Writes a container's region before the container starts.

The draft is written in the parent directory, which no container can write to, and renamed in one
step. The file is left sparse, as the library itself leaves it: two megabytes to its readers,
some kilobytes on disk.
"""

import os
import stat
import threading
from pathlib import Path

from services.node_agent.isolation.region import Region, RegionPath
from services.node_agent.isolation.region_control import restore_limits
from services.node_agent.isolation.region_image import RegionSeed, image_of, pieces_of
from services.node_agent.isolation.region_layouts import V1_2
from services.node_agent.isolation.region_reader import open_region, read_region
from shared.model.errors import UnavailableError

MODE = 0o666
"""The container's processes may run as any user."""


def seed_region(path: RegionPath, seed: RegionSeed, *, starting: bool) -> None:
    """Ensure a region with these limits, verified byte for byte.

    `starting` means that no process of the container runs: an earlier region is replaced, since
    pids of ended processes would be mistaken for new ones. Otherwise a region in use keeps its file
    and its processes, and its limits are written again.
    Raises UnavailableError naming the file and what is wrong: the container must not start.
    """
    if not starting and _restored(path, seed):
        return
    image = image_of(seed)
    if _holds(path, image):
        return
    try:
        _replace(path, seed)
    except OSError as error:
        raise UnavailableError(
            f"the limits of the container cannot be set: {path.directory}/{path.name}: "
            f"{error.strerror}"
        ) from error
    if not _holds(path, image):
        raise UnavailableError(
            f"the limits of the container cannot be set: {path.directory}/{path.name} does not "
            "have the content that was written to it; check the disk, and what else writes there"
        )


def _restored(path: RegionPath, seed: RegionSeed) -> bool:
    if not isinstance(read_region(path), Region):
        return False
    restore_limits(path, seed)
    return True


def _replace(path: RegionPath, seed: RegionSeed) -> None:
    directory = os.open(path.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        own = f".{Path(path.directory).name}.seed-{os.getpid()}-{threading.get_ident()}"
        draft = Path(path.directory).with_name(own)
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


def _holds(path: RegionPath, image: bytes) -> bool:
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
