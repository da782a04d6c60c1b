"""HAMi-core's library on this node, installed in a directory that is named after its content.

Containers map the file, so an existing file is never changed: other content is written to another
directory, atomically. Versions that no container mounts any more are removed.
"""

import asyncio
import contextlib
import hashlib
import logging
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

logger = logging.getLogger(__name__)

CURRENT = "current"
"""A file that names the directory of the library that new containers mount."""
LOAD_S = 10.0
_LOAD = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
_IN_CONTAINERS = ("libcuda.so", "libnvidia-ml.so")
"""Libraries that the driver's mounts provide; the agent seldom has them."""
_BLOCK = 1 << 20


def install(source: Path, root: Path) -> Path:
    """Copy the library to the directory of its content, unless it exists; return the file.

    Raises UnavailableError if the source cannot be read, or is not a library for this machine.
    """
    draft = root / f".draft-{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        content = _copy(source, draft)
        with draft.open("rb") as copied:
            head = copied.read(ELF_HEAD)
        if not is_loadable(head, platform.machine()):
            raise UnavailableError(
                f"{source} is not a 64-bit shared library for {platform.machine()}: name a build "
                "of HAMi-core for this node by --library-source"
            )
        place = root / content / LIBRARY_NAME
        if not place.is_file() or digest_of(place) != content:
            place.parent.mkdir(exist_ok=True)
            draft.chmod(0o644)
            draft.replace(place)
            _sync_directory(place.parent)
        _set_current(root, content)
    except OSError as error:
        raise UnavailableError(
            f"{error.filename or source}: {error.strerror}; --library-source must be a file, and "
            "--state-dir writable"
        ) from error
    finally:
        draft.unlink(missing_ok=True)
    return place


async def install_named(source: Path | None, root: Path) -> None:
    """Install the library that the operator names; if that fails, the current one stays."""
    if source is None:
        return
    try:
        logger.info("containers mount %s", await asyncio.to_thread(install, source, root))
    except UnavailableError as error:
        logger.error("containers mount %s still: %s", current_library(root), error)  # noqa: TRY400


def current_library(root: Path) -> Path:
    """Return the library that was installed last; without one, a path that does not exist."""
    try:
        content = (root / CURRENT).read_text().strip()
    except OSError:
        content = ""
    return root / (Path(content).name or "none") / LIBRARY_NAME


def remove_unused_versions(
    root: Path, mounted: Collection[str], *, now: float, unused_s: float
) -> list[Path]:
    """Remove versions older than `unused_s` that are neither current nor mounted; return them."""
    in_use = {current_library(root).parent} | {Path(path).parent for path in mounted}
    removed: list[Path] = []
    with contextlib.suppress(OSError):
        for entry in sorted(root.iterdir()):
            old = entry.is_dir() and now - entry.stat().st_mtime > unused_s
            if old and entry not in in_use and (entry / LIBRARY_NAME).is_file():
                shutil.rmtree(entry)
                removed.append(entry)
    return removed


def digest_of(path: Path) -> str:
    """Return the directory name for a file's content: a part of its SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


async def unusable_reason(path: Path) -> str:
    """Return why the library cannot enforce limits; empty: it can."""
    error = await load_error(path)
    if error:
        return f"it does not load: {error}"
    return await asyncio.to_thread(lambda: incompatible_region_layout(path.read_bytes()))


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


def _copy(source: Path, draft: Path) -> str:
    """Copy onto disk; return the name of the content that was copied."""
    content = hashlib.sha256()
    with source.open("rb") as origin, draft.open("wb") as copy:
        while block := origin.read(_BLOCK):
            content.update(block)
            copy.write(block)
        copy.flush()
        os.fsync(copy.fileno())
    return content.hexdigest()[:32]


def _set_current(root: Path, content: str) -> None:
    draft = root / f".{CURRENT}-{os.getpid()}"
    draft.write_text(content)
    draft.replace(root / CURRENT)
    _sync_directory(root)


def _sync_directory(directory: Path) -> None:
    """Flush the directory's entries to disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
