"""The files of a container's compute time.

The container can only read its limits, but can forge what it uses, and lift its limit by it.
"""

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from services.node_agent.compute_time.time_layouts import (
    LIMITS_BYTES,
    USE_BYTES,
    TimeLimit,
    TimeUse,
    limits_image,
    parse_limits,
    parse_use,
    unused_image,
)
from services.node_agent.files import irregular, open_checked, remove_tree, replace_file
from shared.model.names import DeviceUuid


def write_time_limits(path: Path, limits: Sequence[TimeLimit]) -> None:
    """Write in place, since running containers have the file mounted. Raises OSError."""
    image = limits_image(limits)
    if not path.is_file() or path.stat().st_size != LIMITS_BYTES:
        replace_file(path, image)
        return
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.pread(file, LIMITS_BYTES, 0) != image:
            os.pwrite(file, image, 0)
    finally:
        os.close(file)


def read_time_limits(path: Path, devices: Sequence[DeviceUuid]) -> tuple[TimeLimit, ...] | None:
    """Return None without a whole file."""
    return parse_limits(_read(path, LIMITS_BYTES), devices)


def read_time_use(path: Path, devices: int) -> tuple[TimeUse, ...] | None:
    """Return None without a whole file."""
    return parse_use(_read(path, USE_BYTES), devices)


def remove_time_use(path: Path) -> None:
    """Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)


def reset_time_use(path: Path) -> None:
    """Write in place: running processes have the file mapped. Raises OSError.

    What is no file is replaced: a container can make anything there.
    """
    try:
        file = open_checked(path, os.O_RDWR | os.O_CLOEXEC, irregular)
    except FileNotFoundError:
        file = "it does not exist"
    if isinstance(file, str):
        remove_time_use(path)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.fchmod(file, 0o666)
        os.pwrite(file, unused_image(time.monotonic_ns()), 0)
    finally:
        os.close(file)


def _read(path: Path, size: int) -> bytes:
    with contextlib.suppress(OSError):
        file = open_checked(path, os.O_RDONLY | os.O_CLOEXEC, irregular)
        if isinstance(file, int):
            try:
                return os.pread(file, size, 0)
            finally:
                os.close(file)
    return b""
