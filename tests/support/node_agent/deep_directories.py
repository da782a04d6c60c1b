"""What a container can make in a directory that it may write to."""

import os
from pathlib import Path

DEPTH = 1_100
"""More than calls of Python may have in each other."""


def make_deep(directory: Path) -> None:
    """Make directories in each other, each with a file."""
    directory.mkdir(parents=True, exist_ok=True)
    current = os.open(directory, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir("deeper", dir_fd=current)
        os.close(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=current))
        inner = os.open("deeper", os.O_RDONLY, dir_fd=current)
        os.close(current)
        current = inner
    os.close(current)
