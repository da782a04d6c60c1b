"""Files of the node agent, which are replaced whole: a reader sees the old content or the new.

And what it may safely do in directories that containers can write to.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable
from itertools import islice
from pathlib import Path, PurePath
from threading import get_ident

SOME = 1000
"""Entries of a directory that are held at once."""
MOST_REMOVED = 100_000
"""About as many entries are removed in one call: a few seconds of work."""


def replace_file(path: Path, content: bytes) -> None:
    """Give a file this content by a new inode, on disk when this returns; make its directory.

    Raises OSError; the file is unchanged then. For example, `replace_file(state_dir / "x.json",
    b"{}")`.
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
    """Flush a directory's entries to disk. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_checked(
    path: PurePath, flags: int, problem_of: Callable[[os.stat_result], str | None]
) -> int | str:
    """Open what passes a check, or return its problem; the caller closes what is returned.

    A container may replace the file meanwhile: what is opened is what was checked, so that no
    device and no pipe of it is ever opened. Raises OSError.
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
    nor stack. No link is followed. Raises OSError, also after `MOST_REMOVED` entries: what is left
    goes with the next call.
    """
    top = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        count = 0
        while entries := _some_entries(top):
            for entry in entries:
                count += _remove_entry(entry, top)
            if count > MOST_REMOVED:
                raise OSError(errno.EAGAIN, "it has too many files to remove at once", directory)
    finally:
        os.close(top)
    directory.rmdir()


def _remove_entry(entry: "os.DirEntry[str]", top: int) -> int:
    """Remove an entry of the first level, a directory with its files; return how many they were."""
    if not entry.is_dir(follow_symlinks=False):
        os.unlink(entry.name, dir_fd=top)
        return 1
    inner = os.open(entry.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
    try:
        entries = _some_entries(inner)
        for below in entries:
            if below.is_dir(follow_symlinks=False):
                os.rename(below.name, secrets.token_hex(), src_dir_fd=inner, dst_dir_fd=top)
            else:
                os.unlink(below.name, dir_fd=inner)
    finally:
        os.close(inner)
    if len(entries) < SOME:
        os.rmdir(entry.name, dir_fd=top)
    return len(entries) + 1


def _some_entries(directory: int) -> "list[os.DirEntry[str]]":
    with os.scandir(directory) as entries:
        return list(islice(entries, SOME))
