"""HAMi-core's library on this node.

Containers map the library, so an existing file is never changed: each content has a directory, and
a file names the current one.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from services.node_agent.files import replace_file, sync_directory
from services.node_agent.isolation.region_layouts import (
    incompatible_region_layout,
    region_layout_of,
)
from services.node_agent.metrics import LIBRARY
from shared.dialects.hami_core import LIBRARY_NAME, LOG_LEVEL
from shared.model.errors import UnavailableError

logger = logging.getLogger(__name__)

CURRENT = "current"
LOAD_S = 10.0
"""Time limit of a trial load in a process of its own."""
_ELF_HEAD = 20
_SHARED_OBJECT = 3
_MACHINES = {"x86_64": 62, "aarch64": 183}
_CONTENT = re.compile(r"[\w.-]+", re.ASCII)
_NUMBERS = re.compile(r"\d+")
_LOAD = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
_IN_CONTAINERS = ("libcuda.so", "libnvidia-ml.so")

Identity = tuple[int, ...]
"""Empty if the file does not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLibrary:
    path: Path
    version: str = ""
    """Such as `v2.9.0` of libvgpu.so.v2.9.0, or empty."""

    @property
    def content(self) -> str:
        return self.path.parent.name


class NodeLibrary:
    """Installs a library only if it loads and has the layout of our regions.

    Without a source, GPUs are simulated.
    """

    def __init__(self, root: Path, source: Path | None) -> None:
        self.root = root
        self.source = source
        self.current = current_library(root) if source else simulated_library(root)
        self.unusable_reason = ""
        self._checked: tuple[Identity, Identity] | None = None
        self._reported = ""

    @property
    def simulated(self) -> bool:
        """An empty file must not be preloaded: the loader would warn."""
        return self.source is None

    async def update(self) -> bool:
        if self.source is None:
            exists = self.current.path.is_file()
            self.unusable_reason = "" if exists else f"{self.current.path} does not exist"
            return exists
        source, before, current = await asyncio.to_thread(self._look, self.source)
        if self._checked != (before, current):
            await self._install(source)
            self._checked = before, await asyncio.to_thread(_identity, self.current.path)
        return not self.unusable_reason

    def remove_unused(self, mounted: Collection[str], *, unused_s: float) -> None:
        if self.source is None:
            return
        in_use = {current_library(self.root).path.parent, *(Path(path).parent for path in mounted)}
        with contextlib.suppress(OSError):
            for entry in self.root.iterdir():
                old = entry.is_dir() and entry.stat().st_mtime < time.time() - unused_s
                if old and entry not in in_use and (entry / LIBRARY_NAME).is_file():
                    shutil.rmtree(entry)

    def _look(self, source: Path) -> tuple[Path, Identity, Identity]:
        file = source_file(source)
        return file, _identity(file), _identity(self.current.path)

    async def _install(self, source: Path) -> None:
        wrong = await self._install_usable(source)
        self.current = await asyncio.to_thread(current_library, self.root)
        self.unusable_reason = ""
        if wrong and (own := await unusable_reason(self.current.path)):
            exists = self.current.path.is_file()
            self.unusable_reason = f"{self.current.path} is unusable: {own}" if exists else wrong
        layout = await asyncio.to_thread(layout_name, self.current.path)
        LIBRARY.clear()
        if not self.unusable_reason:
            LIBRARY.labels(self.current.version, layout, self.current.content).set(1)
        text = f"containers mount {self.current.path}, installed from {source}"
        if self.unusable_reason:
            text = (
                "only whole GPUs and MIG instances are allocated, not shares: "
                f"{self.unusable_reason}"
            )
        elif wrong:
            text = f"containers still mount {self.current.path}: {wrong}"
        if text != self._reported:
            logger.log(logging.WARNING if wrong else logging.INFO, text)
        self._reported = text

    async def _install_usable(self, source: Path) -> str:
        try:
            stored = await asyncio.to_thread(_store, source, self.root)
            if wrong := await unusable_reason(stored.path):
                return f"{source} is unusable: {wrong}"
            named = f"{stored.content} {stored.version}".strip().encode()
            await asyncio.to_thread(replace_file, self.root / CURRENT, named)
        except UnavailableError as error:
            return str(error)
        except OSError as error:
            return f"{error.filename or self.root}: {error.strerror}"
        return ""


def simulated_library(root: Path) -> StoredLibrary:
    return StoredLibrary(path=root / "simulated" / LIBRARY_NAME)


def current_library(root: Path) -> StoredLibrary:
    try:
        content, _, version = (root / CURRENT).read_text().strip().partition(" ")
    except (OSError, UnicodeError):
        content = ""
        version = ""
    if not _CONTENT.fullmatch(content):
        return StoredLibrary(path=root / "none" / LIBRARY_NAME)
    return StoredLibrary(path=root / content / LIBRARY_NAME, version=version)


def source_file(source: Path) -> Path:
    """In a directory, return libvgpu.so, or else the highest libvgpu.so.VERSION."""
    if not source.is_dir():
        return source
    usual = source / LIBRARY_NAME
    versions = () if usual.is_file() else source.glob(f"{LIBRARY_NAME}.*")
    numbers = {path: [*map(int, _NUMBERS.findall(path.name))] for path in versions}
    return max(numbers, key=numbers.__getitem__, default=usual)


def _store(source: Path, root: Path) -> StoredLibrary:
    """Raises OSError, and UnavailableError if the source changes meanwhile."""
    draft = root / f".draft-{os.getpid()}"
    root.mkdir(parents=True, exist_ok=True)
    try:
        before = _identity(source)
        shutil.copyfile(source, draft)
        with draft.open("rb") as copy:
            os.fsync(copy.fileno())
        content = digest_of(draft)
        if before != _identity(source):
            raise UnavailableError(f"{source} changed while it was copied")
        place = root / content / LIBRARY_NAME
        if not place.is_file() or digest_of(place) != content:
            place.parent.mkdir(exist_ok=True)
            draft.chmod(0o644)
            draft.replace(place)
            sync_directory(place.parent)
    finally:
        draft.unlink(missing_ok=True)
    return StoredLibrary(path=place, version=source.name.removeprefix(LIBRARY_NAME).lstrip("."))


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def _identity(path: Path) -> Identity:
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns


async def unusable_reason(path: Path) -> str:
    try:
        content = await asyncio.to_thread(path.read_bytes)
    except OSError as unreadable:
        return unreadable.strerror or str(unreadable)
    if not is_loadable(content, platform.machine()):
        return f"it is not a 64-bit shared library for {platform.machine()}"
    error = await load_error(path)
    return f"it does not load: {error}" if error else incompatible_region_layout(content)


def is_loadable(library: bytes, machine: str) -> bool:
    if len(library) < _ELF_HEAD or library[:6] != b"\x7fELF\x02\x01":
        return False
    kind, built_for = struct.unpack_from("<HH", library, 16)
    return bool(kind == _SHARED_OBJECT and built_for == _MACHINES.get(machine, built_for))


def layout_name(path: Path) -> str:
    try:
        layout = region_layout_of(path.read_bytes())
    except OSError:
        return ""
    return "" if layout is None else layout.name


async def load_error(path: Path) -> str:
    """Return why the library does not load, or an empty text.

    It is not loaded in a process of asyncio, as gRPC's handlers of fork can crash such a child.
    """
    try:
        process = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", _LOAD, str(path)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={LOG_LEVEL: "0"},
            timeout=LOAD_S,
            check=False,
        )
    except OSError as error:
        return f"no process can be started: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"it did not load within {LOAD_S:g} s"
    if process.returncode == 0:
        return ""
    lines = [line for line in process.stderr.decode(errors="replace").splitlines() if line.strip()]
    reason = lines[-1] if lines else f"its process ended with {process.returncode}"
    return "" if any(name in reason for name in _IN_CONTAINERS) else reason
