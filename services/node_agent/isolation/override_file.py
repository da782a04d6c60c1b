"""The file from which HAMi-core sets variables in each process of a container.

It is the container's own, mounted read-only over one that its image may have.
"""

import os
from pathlib import Path

from shared.dialects.dialect import ContainerSetup
from shared.dialects.hami_core import OVERRIDES, overrides


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
