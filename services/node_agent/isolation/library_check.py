"""Whether a file is a library of HAMi-core that loads, and whose regions have our layout."""

import asyncio
import platform
import sys
from pathlib import Path

from services.node_agent.isolation.host_paths import (
    ELF_HEAD,
    incompatible_region_layout,
    is_loadable,
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


async def load_error(path: Path) -> str:
    """Load the library in a process of its own; return why that fails; empty: it loads.

    Missing libraries of the driver do not count: containers have them.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _LOAD, str(path)),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={LOG_LEVEL: "0"},
        )
    except OSError as error:
        return f"no process can be started: {error.strerror}"
    try:
        async with asyncio.timeout(LOAD_S):
            _, stderr = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return f"it did not load within {LOAD_S:g} s"
    if process.returncode == 0:
        return ""
    lines = [line for line in stderr.decode(errors="replace").splitlines() if line.strip()]
    reason = lines[-1] if lines else f"its process ended with {process.returncode}"
    return "" if any(name in reason for name in _IN_CONTAINERS) else reason
