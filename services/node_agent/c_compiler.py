"""Compiles the agent's few parts in C, where the image has not done so."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from shared.model.errors import UnavailableError

FLAGS = ("-O2", "-s", "-std=gnu11", "-Wall", "-Wextra", "-Werror")


def compile_c(target: Path, sources: Sequence[Path], flags: Sequence[str]) -> Path:
    """Raises UnavailableError without a C compiler, or with its message."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise UnavailableError(f"{target.name} needs a C compiler: install gcc and libc6-dev")
    target.parent.mkdir(parents=True, exist_ok=True)
    result = subprocess.run(  # noqa: S603 - the compiler, with our own arguments
        [compiler, *FLAGS, *flags, "-o", target, *sources],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise UnavailableError(f"{target.name} does not compile: {result.stderr.strip()}")
    return target
