"""Makes on disk what containers mount, and removes what pods left behind."""

import asyncio
import contextlib
import logging
import os
import platform
import shutil
import threading
import time
from pathlib import Path

from services.node_agent.isolation.host_paths import (
    ELF_HEAD,
    HostLayout,
    is_loadable,
    orphaned_directories,
    required_paths,
)
from services.node_agent.isolation.library import remove_unused_versions, unusable_reason
from services.node_agent.isolation.region_image import region_path_of, seed_of
from services.node_agent.isolation.region_seed import seed_region
from shared.dialects.dialect import ContainerSetup
from shared.dialects.hami_core import LIBRARY
from shared.model.errors import UnavailableError
from shared.model.names import PodUid

logger = logging.getLogger(__name__)

SHARED = 0o777
PROBE_BYTES = 4096
LEAST_BYTES = 16 * 1024 * 1024
"""Regions, directories and the checkpoint of some pods."""
LEAST_FILES = 64
"""Some file systems count files and have room for so many only."""
NEW_S = 300.0
"""What was made or changed within this time stays, whoever it is for: its pod may be on its way."""


class ContainerFiles:
    """Directories and files of one node.

    With `simulated`, the library is an empty stand-in, and nothing is preloaded: a dynamic linker
    that is told to preload an empty file complains in every process. Below `installed` are the
    versions of the library that we have installed, if it was we.
    """

    def __init__(
        self, layout: HostLayout, *, simulated: bool, installed: Path | None = None
    ) -> None:
        self.layout = layout
        self.simulated = simulated
        self.installed = installed
        self.unwritable_reason = ""
        """Why no container could be prepared when it was last looked at; empty: it could."""
        self._tried: tuple[tuple[int, ...], str] | None = None

    async def create_shared_files(self) -> None:
        """Make what all containers share. Raises UnavailableError naming what is missing."""
        await asyncio.to_thread(self._begin)

    async def prepare(self, setup: ContainerSetup, *, starting: bool = False) -> None:
        """Make what one container mounts, if it is missing, and see that its limits are set.

        What is there stays as it is; only what an earlier run of the container left in its region
        is replaced when it is `starting`. Raises UnavailableError naming a file that is missing
        and is not ours to make (a runtime would make a directory of its name), or a region that
        cannot be made; RequestError if the limits are none.
        """
        await asyncio.to_thread(self._prepare, setup, starting=starting)

    async def can_isolate(self) -> bool:
        """Say whether the library is there, and one that a process of this machine can load.

        It is loaded once per file: it may be an installation that somebody else is about to finish.
        """
        there = await asyncio.to_thread(self._isolates)
        if self.simulated or not there:
            return there
        path = Path(self.layout.library)
        mark = await asyncio.to_thread(_mark_of, path)
        if self._tried is None or self._tried[0] != mark:
            why = await unusable_reason(path)
            if why:
                logger.warning("%s is of no use, nothing can be limited: %s", path, why)
            self._tried = (mark, why)
        return not self._tried[1]

    async def remove_unused(self, keep: set[PodUid], mounted: set[str] | None) -> None:
        """Remove what is of pods that are gone, and versions of the library that nobody mounts.

        Unless it is known what is mounted, all versions stay.
        """
        await asyncio.to_thread(self._clean, keep)
        if self.installed is not None and mounted is not None:
            await asyncio.to_thread(remove_unused_versions, self.installed, mounted, time.time())

    async def probe_disk(self) -> None:
        """See whether a container could be prepared now."""
        lack = await asyncio.to_thread(self._lack)
        if lack and lack != self.unwritable_reason:
            logger.error("no pod may come here: %s", lack)
        self.unwritable_reason = lack

    def _lack(self) -> str:
        state, probe = self.layout.state_dir, Path(self.layout.state_dir) / ".probe"
        try:
            with probe.open("wb") as file:
                file.write(bytes(PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
            probe.unlink()
        except OSError as error:
            return f"nothing can be written below {state}: {error.strerror}"
        return self.disk_pressure()

    def disk_pressure(self) -> str:
        """Say at once why there is no room on the disk; empty: there is."""
        state = self.layout.state_dir
        try:
            room = os.statvfs(state)
        except OSError as error:
            return f"nothing can be written below {state}: {error.strerror}"
        if room.f_bavail * room.f_frsize < LEAST_BYTES:
            return f"the disk of {state} is full"
        if room.f_files and room.f_favail < LEAST_FILES:
            return f"the disk of {state} has no room for more files"
        return ""

    def _begin(self) -> None:
        try:
            Path(self.layout.containers).mkdir(parents=True, exist_ok=True)
            preloaded = b"" if self.simulated else LIBRARY.encode()
            _keep(Path(self.layout.paths.preload), preloaded)
            if self.simulated:
                _write_once(Path(self.layout.library), b"")
        except OSError as error:
            raise UnavailableError(
                f"{error.filename or self.layout.state_dir}: {error.strerror}; --state-dir and "
                "--library-dir must be writable by the node agent"
            ) from error

    def _isolates(self) -> bool:
        try:
            with Path(self.layout.library).open("rb") as library:
                return self.simulated or is_loadable(library.read(ELF_HEAD), platform.machine())
        except OSError:
            return False

    def _prepare(self, setup: ContainerSetup, *, starting: bool) -> None:
        self._begin()
        place = region_path_of(setup)
        needed = required_paths(setup, place)
        library = str(self.layout.library)
        if library in needed.files and self._tried is not None and self._tried[1]:
            raise UnavailableError(f"{library} is of no use: {self._tried[1]}")
        for file in needed.files:
            if not Path(file).is_file():
                raise UnavailableError(
                    f"{file} is not there, and containers mount it: install HAMi-core's library "
                    "on this node, or give its directory by --library-dir"
                )
        try:
            for directory in needed.directories:
                _make_shared(Path(directory))
        except OSError as error:
            raise UnavailableError(f"{error.filename}: {error.strerror}") from error
        if place is not None:
            seed_region(place, seed_of(setup.environment), starting=starting)

    def _clean(self, keep: set[PodUid]) -> None:
        root, now = Path(self.layout.containers), time.time()
        try:
            names = [entry.name for entry in root.iterdir()]
        except OSError as error:
            raise UnavailableError(f"{root} cannot be listed: {error.strerror}") from error
        for name in orphaned_directories(names, keep):
            entry = root / name
            with contextlib.suppress(OSError):
                if abs(now - entry.lstat().st_mtime) < NEW_S:
                    continue
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.unlink()


def _mark_of(path: Path) -> tuple[int, ...]:
    """Return what tells a file from another that takes its place; empty: there is none."""
    try:
        seen = path.stat()
    except OSError:
        return ()
    return seen.st_ino, seen.st_size, seen.st_mtime_ns


def _make_shared(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if directory.stat().st_mode & SHARED != SHARED:
        directory.chmod(SHARED)


def _write_once(path: Path, content: bytes) -> None:
    """Make a file unless it is there."""
    if not path.is_file():
        _write(path, content)


def _keep(path: Path, content: bytes) -> None:
    """Make a file unless it is there with this content; containers keep the one they have open."""
    if not path.is_file() or path.read_bytes() != content:
        _write(path, content)


def _write(path: Path, content: bytes) -> None:
    """Write a file that appears whole, with an inode of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    draft.write_bytes(content)
    draft.chmod(0o644)
    draft.replace(path)
