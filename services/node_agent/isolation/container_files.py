"""Host files that containers mount: created before the start, removed after the pod's end."""

import asyncio
import contextlib
import functools
import logging
import os
import shutil
import threading
import time
from pathlib import Path, PurePosixPath

from services.node_agent.agent_timing import DEFAULT_TIMING, AgentTiming
from services.node_agent.isolation.host_paths import (
    HostLayout,
    orphaned_directories,
    required_paths,
)
from services.node_agent.isolation.library import NodeLibrary
from services.node_agent.isolation.region_image import region_path_of, seed_of
from services.node_agent.isolation.region_writer import seed_region, write_overrides
from shared.dialects.dialect import ContainerSetup
from shared.dialects.hami_core import LIBRARY
from shared.model.errors import UnavailableError
from shared.model.names import PodUid

logger = logging.getLogger(__name__)

SHARED_MODE = 0o777
PROBE_BYTES = 4096
MIN_FREE_BYTES = 16 * 1024 * 1024
"""Room for regions, directories and the checkpoint of some pods."""
MIN_FREE_FILES = 64
"""Some file systems have room for a fixed number of files only."""


class ContainerFiles:
    """Directories and files of one node."""

    def __init__(
        self,
        state_dir: PurePosixPath,
        library: NodeLibrary,
        *,
        min_free_bytes: int = MIN_FREE_BYTES,
        timing: AgentTiming = DEFAULT_TIMING,
    ) -> None:
        self.state_dir = state_dir
        self.library = library
        self.min_free_bytes = min_free_bytes
        self.timing = timing
        self.unwritable_reason = ""
        """Why no container could be prepared at the last probe; empty: it could."""

    @property
    def layout(self) -> HostLayout:
        """The paths that new containers mount."""
        return _layout(self.state_dir, self.library.current.path)

    async def create_shared_files(self) -> None:
        """Create the files that all containers share; raises UnavailableError naming the path."""
        await asyncio.to_thread(self._create_shared_files)

    async def prepare(self, setup: ContainerSetup, *, starting: bool = False) -> None:
        """Create a container's missing files, and set its limits.

        Existing files stay, except the region of an earlier run if the container is `starting`.
        Raises UnavailableError naming a missing file that the agent does not create (a runtime
        would create a directory instead), or a region that cannot be written; RequestError if the
        limits are invalid.
        """
        await asyncio.to_thread(self._prepare, setup, starting=starting)

    async def remove_unused(self, live: set[PodUid], mounted: set[str] | None) -> None:
        """Remove the files of pods other than `live`, and unmounted versions of the library.

        All versions stay if `mounted` is None, which means that it is not known.
        """
        await asyncio.to_thread(self._remove_directories, live)
        if mounted is not None:
            await self.library.remove_unused(mounted, unused_s=self.timing.library_unused_s)

    async def probe_disk(self) -> None:
        """Check whether a container could be prepared now."""
        reason = await asyncio.to_thread(self._probe_disk)
        if reason and reason != self.unwritable_reason:
            logger.error("no pod may be bound to this node: %s", reason)
        self.unwritable_reason = reason

    def _probe_disk(self) -> str:
        state, probe = self.state_dir, Path(self.state_dir) / ".probe"
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
        """Return at once why the disk is too full; empty: it has room."""
        state = self.state_dir
        try:
            free = os.statvfs(state)
        except OSError as error:
            return f"nothing can be written below {state}: {error.strerror}"
        if free.f_bavail * free.f_frsize < self.min_free_bytes:
            return f"the disk of {state} is full"
        if free.f_files and free.f_favail < MIN_FREE_FILES:
            return f"the disk of {state} has no room for more files"
        return ""

    def _create_shared_files(self) -> None:
        try:
            Path(self.layout.containers).mkdir(parents=True, exist_ok=True)
            preloaded = b"" if self.library.simulated else LIBRARY.encode()
            _ensure_content(Path(self.layout.paths.preload), preloaded)
            if self.library.simulated:
                _ensure_exists(self.library.current.path, b"")
        except OSError as error:
            raise UnavailableError(
                f"{error.filename or self.state_dir}: {error.strerror}; --state-dir must be "
                "writable by the node agent"
            ) from error

    def _prepare(self, setup: ContainerSetup, *, starting: bool) -> None:
        self._create_shared_files()
        region_path = region_path_of(setup)
        needed = required_paths(setup, region_path)
        library, unusable = str(self.library.current.path), self.library.unusable_reason
        if library in needed.files and unusable:
            raise UnavailableError(f"limits cannot be enforced: {unusable}")
        for file in needed.files:
            if not Path(file).is_file():
                raise UnavailableError(f"{file} does not exist, and the container mounts it")
        try:
            write_overrides(setup)
            for directory in needed.directories:
                _make_shared(Path(directory))
        except OSError as error:
            raise UnavailableError(f"{error.filename}: {error.strerror}") from error
        if region_path is not None:
            seed_region(region_path, seed_of(setup.environment), starting=starting)

    def _remove_directories(self, live: set[PodUid]) -> None:
        root, now = Path(self.layout.containers), time.time()
        try:
            names = [entry.name for entry in root.iterdir()]
        except OSError as error:
            raise UnavailableError(f"{root} cannot be listed: {error.strerror}") from error
        for name in orphaned_directories(names, live):
            entry = root / name
            with contextlib.suppress(OSError):
                if abs(now - entry.lstat().st_mtime) < self.timing.new_files_s:
                    continue
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.unlink()


@functools.lru_cache(maxsize=1)
def _layout(state_dir: PurePosixPath, library: Path) -> HostLayout:
    return HostLayout(state_dir=state_dir, library=PurePosixPath(library))


def _make_shared(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if directory.stat().st_mode & SHARED_MODE != SHARED_MODE:
        directory.chmod(SHARED_MODE)


def _ensure_exists(path: Path, content: bytes) -> None:
    """Create a file unless it exists."""
    if not path.is_file():
        _write(path, content)


def _ensure_content(path: Path, content: bytes) -> None:
    """Create a file unless it exists with this content; open files are not changed."""
    if not path.is_file() or path.read_bytes() != content:
        _write(path, content)


def _write(path: Path, content: bytes) -> None:
    """Write a file atomically, with a new inode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    draft.write_bytes(content)
    draft.chmod(0o644)
    draft.replace(path)
