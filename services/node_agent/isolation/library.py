"""HAMi-core's library on this node: installed once per content, in a directory named after it.

Containers mount the file and keep it mapped, so a file that is there is never written again:
another content lies in another directory, and appears there whole. What no container mounts any
more goes.
"""

import asyncio
import contextlib
import hashlib
import os
import platform
import shutil
import sys
from collections.abc import Collection
from pathlib import Path

from services.node_agent.isolation.host_paths import (
    ELF_HEAD,
    incompatible_region_layout,
    is_loadable,
)
from shared.dialects.hami_core import LIBRARY_NAME, LOG_LEVEL
from shared.model.errors import UnavailableError

CURRENT = "current"
"""A file that names the directory of the library that new containers mount."""
UNUSED_S = 600.0
"""A version that nobody mounts stays so long: a container may be on its way."""
LOAD_S = 10.0
_LOAD = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
_IN_CONTAINERS = ("libcuda.so", "libnvidia-ml.so")
"""What the driver's own mounts bring, and what is seldom beside an agent."""
_BLOCK = 1 << 20


def install(source: Path, root: Path) -> Path:
    """Copy the library to where its content says, unless it is there; return the file.

    Raises UnavailableError if the source cannot be read, or is no library for this machine.
    """
    draft = root / f".draft-{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        content = _copy(source, draft)
        with draft.open("rb") as copied:
            head = copied.read(ELF_HEAD)
        if not is_loadable(head, platform.machine()):
            raise UnavailableError(
                f"{source} is no 64-bit shared library for {platform.machine()}: name a build of "
                "HAMi-core for this node by --library-source"
            )
        place = root / content / LIBRARY_NAME
        if not place.is_file() or digest_of(place) != content:
            place.parent.mkdir(exist_ok=True)
            draft.chmod(0o644)
            draft.replace(place)
            _settle(place.parent)
        _point(root, content)
    except OSError as error:
        raise UnavailableError(
            f"{error.filename or source}: {error.strerror}; --library-source must be a file, and "
            "--state-dir writable"
        ) from error
    finally:
        draft.unlink(missing_ok=True)
    return place


def current_library(root: Path) -> Path:
    """Return the library that was installed last; where there is none, a file that is not there."""
    try:
        content = (root / CURRENT).read_text().strip()
    except OSError:
        content = ""
    return root / (Path(content).name or "none") / LIBRARY_NAME


def remove_unused_versions(root: Path, mounted: Collection[str], now: float) -> list[Path]:
    """Remove versions that are neither current nor mounted by anybody; return what was removed."""
    kept = {current_library(root).parent} | {Path(path).parent for path in mounted}
    gone: list[Path] = []
    with contextlib.suppress(OSError):
        for entry in sorted(root.iterdir()):
            old = entry.is_dir() and now - entry.stat().st_mtime > UNUSED_S
            if old and entry not in kept and (entry / LIBRARY_NAME).is_file():
                shutil.rmtree(entry)
                gone.append(entry)
    return gone


def digest_of(path: Path) -> str:
    """Return the name of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


async def unusable_reason(path: Path) -> str:
    """Return why the library cannot hold containers to their limits, or nothing."""
    why = await load_error(path)
    if why:
        return f"it does not load: {why}"
    return await asyncio.to_thread(lambda: incompatible_region_layout(path.read_bytes()))


async def load_error(path: Path) -> str:
    """Load the library in a process of its own; return why that fails, or nothing.

    That the driver's libraries are not beside the agent is no failure: containers have them.
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
            _, said = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return f"it did not load within {LOAD_S:g} s"
    if process.returncode == 0:
        return ""
    lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
    why = lines[-1] if lines else f"its process ended with {process.returncode}"
    return "" if any(name in why for name in _IN_CONTAINERS) else why


def _copy(source: Path, draft: Path) -> str:
    """Copy onto disk; return the name of what was copied, whatever becomes of the source."""
    content = hashlib.sha256()
    with source.open("rb") as origin, draft.open("wb") as copy:
        while block := origin.read(_BLOCK):
            content.update(block)
            copy.write(block)
        copy.flush()
        os.fsync(copy.fileno())
    return content.hexdigest()[:32]


def _point(root: Path, content: str) -> None:
    draft = root / f".{CURRENT}-{os.getpid()}"
    draft.write_text(content)
    draft.replace(root / CURRENT)
    _settle(root)


def _settle(directory: Path) -> None:
    """Have the directory's entries on disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
