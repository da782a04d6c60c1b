"""A short name for a state directory whose path is too long for the unix sockets in it.

The kernel takes at most 107 bytes as a socket's path; it follows symbolic links on the way.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from services.cli.state_dir import StateDir

MAX_ROOT_BYTES = 107 - len("/nodes/node-999/device-plugins/") - 36
"""What is left for the state directory when the longest socket name has its place."""


@contextlib.contextmanager
def short_root(directory: StateDir) -> Iterator[StateDir]:
    """Yield the directory, by way of a temporary symbolic link if its own path is too long."""
    if len(os.fsencode(directory.root)) <= MAX_ROOT_BYTES:
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="lh-", dir=_short_temporary()) as folder:
        link = Path(folder) / "s"
        link.symlink_to(directory.root, target_is_directory=True)
        yield StateDir(link)


def _short_temporary() -> str:
    found = tempfile.gettempdir()
    return found if len(os.fsencode(found)) <= 20 else "/tmp"  # noqa: S108 - a folder of our own
