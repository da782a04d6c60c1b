"""Files that are replaced whole, and directories that containers can write to."""

import contextlib
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path, PurePath
from threading import get_ident

MOST_REMOVED = 100_000
"""Entries removed in one call: a few seconds of work."""


def replace_file(path: Path, content: bytes) -> None:
    """Write a new inode, on disk when this returns; make its directory.

    Raises OSError; the file is unchanged then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}-{get_ident()}")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.chmod(0o644)
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):
        sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_checked(
    path: PurePath, flags: int, problem_of: Callable[[os.stat_result], str | None]
) -> int | str:
    """Open what passes a check, or return its problem; the caller closes what is returned.

    A container may replace the file meanwhile: no device and no pipe of it is ever opened. Raises
    OSError.
    """
    handles: list[int] = []
    try:
        handles.append(os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW))
        handles.append(os.open(path.name, os.O_PATH | os.O_NOFOLLOW, dir_fd=handles[0]))
        problem = problem_of(os.fstat(handles[1]))
        if problem is not None:
            return problem
        inode = f"/proc/self/fd/{handles[1]}"
        return os.open(inode, flags | os.O_NONBLOCK | os.O_NOCTTY)
    finally:
        for handle in handles:
            os.close(handle)


def irregular(status: os.stat_result) -> str | None:
    """Return why something is no regular file with one name, or None if it is."""
    if stat.S_ISLNK(status.st_mode):
        return "it is a symbolic link"
    if not stat.S_ISREG(status.st_mode):
        return "it is not a regular file"
    return f"it has {status.st_nlink} hard links" if status.st_nlink != 1 else None


def remove_tree(directory: Path) -> None:
    """Remove a directory in which a container may have made anything, or may still.

    Directories in it are moved up to the first level, so that their depth costs neither descriptors
    nor stack. Raises OSError if something is left, also after `MOST_REMOVED` entries: the next call
    goes on.
    """
    top = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        count = 0
        before = -1
        while before < count <= MOST_REMOVED:
            before = count
            count += _empty(top, top, MOST_REMOVED - count)
    finally:
        os.close(top)
    directory.rmdir()


def _empty(directory: int, top: int, most: int) -> int:
    count = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            if count > most:
                break
            with contextlib.suppress(OSError):
                if directory == top and entry.is_dir(follow_symlinks=False):
                    count += _remove_first_level(entry.name, top, most - count)
                    continue
                if entry.is_dir(follow_symlinks=False):
                    os.rename(entry.name, secrets.token_hex(), src_dir_fd=directory, dst_dir_fd=top)
                else:
                    os.unlink(entry.name, dir_fd=directory)
                count += 1
    return count


def _remove_first_level(name: str, top: int, most: int) -> int:
    inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
    try:
        count = _empty(inner, top, most)
    finally:
        os.close(inner)
    with contextlib.suppress(OSError):  # something is left
        os.rmdir(name, dir_fd=top)
        count += 1
    return count
