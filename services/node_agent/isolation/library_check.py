"""Checks that a file is a library of HAMi-core that loads, and whose regions have our layout."""

import asyncio
import platform
import subprocess
import sys
from pathlib import Path

from services.node_agent.isolation.host_paths import (
    ELF_HEAD,
    incompatible_region_layout,
    is_loadable,
    region_layout_of,
)
from shared.dialects.hami_core import LOG_LEVEL

LOAD_S = 10.0
_LOAD = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
_IN_CONTAINERS = ("libcuda.so", "libnvidia-ml.so")
"""Libraries that the driver's mounts provide; the agent seldom has them."""


async def unusable_reason(path: Path) -> str:
    """Return why the library cannot enforce limits; empty: it can."""
    try:
        content = await asyncio.to_thread(path.read_bytes)
    except OSError as unreadable:
        return unreadable.strerror or str(unreadable)
    if not is_loadable(content[:ELF_HEAD], platform.machine()):
        return f"it is not a 64-bit shared library for {platform.machine()}"
    error = await load_error(path)
    return f"it does not load: {error}" if error else incompatible_region_layout(content)


def layout_name(path: Path) -> str:
    """Return the layout of the library's regions; empty: unknown."""
    try:
        found = region_layout_of(path.read_bytes())
    except OSError:
        return ""
    return "" if found is None else found.name


async def load_error(path: Path) -> str:
    """Load the library in a process of its own; return why that fails; empty: it loads.

    Missing libraries of the driver do not count: containers have them.
    """
    try:
        process = await asyncio.to_thread(_load, path)
    except OSError as error:
        return f"no process can be started: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"it did not load within {LOAD_S:g} s"
    if process.returncode == 0:
        return ""
    lines = [line for line in process.stderr.decode(errors="replace").splitlines() if line.strip()]
    reason = lines[-1] if lines else f"its process ended with {process.returncode}"
    return "" if any(name in reason for name in _IN_CONTAINERS) else reason


def _load(path: Path) -> subprocess.CompletedProcess[bytes]:
    """Load the library in a process.

    Not a process of asyncio: gRPC's handlers of fork, which that would run, can crash the child.
    """
    return subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", _LOAD, str(path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={LOG_LEVEL: "0"},
        timeout=LOAD_S,
        check=False,
    )
