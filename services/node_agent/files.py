"""Files of the node agent, which are replaced whole: a reader sees the old content or the new."""

import contextlib
import os
from pathlib import Path
from threading import get_ident


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
