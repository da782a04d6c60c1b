"""Host files that containers mount: created before the start, removed after the pod's end."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Set
from dataclasses import replace
from pathlib import Path, PurePosixPath

from services.node_agent.agent_timing import DEFAULT_TIMING, AgentTiming
from services.node_agent.allocate.device_list_strategies import NULL_DEVICE
from services.node_agent.files import remove_tree, replace_file
from services.node_agent.isolation.library import NodeLibrary
from services.node_agent.isolation.region_image import region_path_of, seed_of
from services.node_agent.isolation.region_writer import seed_region, write_overrides
from shared.dialects import compute_time
from shared.dialects.dialect import ContainerSetup, Paths
from shared.dialects.hami_core import LIBRARY, OVERRIDES
from shared.model.errors import UnavailableError
from shared.model.names import PodUid

logger = logging.getLogger(__name__)

SHARED_MODE = 0o777
PROBE_BYTES = 4096
MIN_FREE_BYTES = 16 * 1024 * 1024
MIN_FREE_FILES = 64
"""Some file systems have room for a fixed number of files only."""


class ContainerFiles:
    def __init__(
        self,
        state_dir: PurePosixPath,
        library: NodeLibrary,
        *,
        timing: AgentTiming = DEFAULT_TIMING,
    ) -> None:
        self.state_dir = state_dir
        self.library = library
        self.min_free_bytes = MIN_FREE_BYTES
        self.timing = timing
        self.unwritable_reason = ""
        self._unprepared: tuple[ContainerSetup, Path] | None = None
        self._partly_removed: set[str] = set()
        """They seem young, as a part was removed."""

    @property
    def paths(self) -> Paths:
        return Paths.below(self.state_dir, self.library.current.path)

    async def create_shared_files(self) -> None:
        await asyncio.to_thread(self._create_shared_files)

    async def prepare(
        self, setup: ContainerSetup, *, starting: bool = False, new: bool = False
    ) -> None:
        """Create a container's missing files, and set its limits.

        Existing files stay, except the region of an earlier run if the container is `starting`. A
        failure for a `new` one, which cannot have changed its files, closes the node until a probe
        has prepared it. Raises UnavailableError naming a path; RequestError if the limits are
        invalid.
        """
        try:
            await asyncio.to_thread(self._prepare, setup, starting=starting)
        except UnavailableError as error:
            if new and not self.library.unusable_reason:  # else shares are not served
                self._unprepared = setup, self.library.current.path
                self._set_unwritable(str(error))
            raise

    async def remove_unused(self, live: Set[PodUid], mounted: Set[str] | None) -> None:
        """All versions of the library stay if `mounted` is None: that is not known."""
        await asyncio.to_thread(self._remove_unused, live, mounted)

    async def probe_disk(self) -> None:
        reason = await asyncio.to_thread(self._probe_disk)
        unprepared = self._unprepared
        if unprepared is not None and not reason:
            reason = await asyncio.to_thread(self._why_unprepared, *unprepared)
        if not reason and self._unprepared is unprepared:
            self._unprepared = None
        if reason or self._unprepared is None:
            self._set_unwritable(reason)

    def _set_unwritable(self, reason: str) -> None:
        if reason and reason != self.unwritable_reason:
            logger.error("no pod may be bound to this node: %s", reason)
        self.unwritable_reason = reason

    def _why_unprepared(self, setup: ContainerSetup, library: Path) -> str:
        if self.library.unusable_reason:
            return ""
        current = str(self.library.current.path)
        mounts = tuple(
            replace(mount, host_path=current) if mount.host_path == str(library) else mount
            for mount in setup.mounts
        )
        try:
            self._prepare(replace(setup, mounts=mounts), starting=False)
        except UnavailableError as error:
            return str(error)
        return ""

    def _probe_disk(self) -> str:
        state = self.state_dir
        probe = Path(self.state_dir) / ".probe"
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
        paths = self.paths
        library = self.library
        try:
            Path(paths.containers).mkdir(parents=True, exist_ok=True)
            hami_core = "" if library.simulated else LIBRARY
            _ensure(Path(paths.preload), hami_core.encode())
            _ensure(Path(paths.time_preload), compute_time.LIBRARY.encode())
            joint = f"{compute_time.LIBRARY}\n{hami_core}".strip()
            _ensure(Path(paths.joint_preload), joint.encode())
            if library.simulated:
                _ensure(library.current.path, b"")
        except OSError as error:
            raise UnavailableError(
                f"{error.filename or self.state_dir}: {error.strerror}; --state-dir must be "
                "writable by the node agent"
            ) from error

    def _prepare(self, setup: ContainerSetup, *, starting: bool) -> None:
        self._create_shared_files()
        region = region_path_of(setup)
        own = {NULL_DEVICE, str(region)}
        for mount in setup.mounts:
            if not (mount.directory or mount.container_path == OVERRIDES or mount.host_path in own):
                self._check_file(mount.host_path)
        try:
            write_overrides(setup)
            for mount in setup.mounts:
                if mount.directory:
                    _make_shared(Path(mount.host_path))
        except OSError as error:
            raise UnavailableError(f"{error.filename}: {error.strerror}") from error
        if region is not None:
            seed_region(region, seed_of(setup.environment), starting=starting)

    def _check_file(self, file: str) -> None:
        unusable = self.library.unusable_reason
        if unusable and file == str(self.library.current.path):
            raise UnavailableError(f"limits cannot be enforced: {unusable}")
        if not Path(file).is_file():
            raise UnavailableError(f"{file} does not exist, and the container mounts it")

    def _remove_unused(self, live: Set[PodUid], mounted: Set[str] | None) -> None:
        self._remove_directories(live)
        if mounted is not None:
            self.library.remove_unused(mounted, unused_s=self.timing.library_unused_s)

    def _remove_directories(self, live: Set[PodUid]) -> None:
        root = Path(self.paths.containers)
        now = time.time()
        try:
            entries = list(root.iterdir())
        except OSError as error:
            raise UnavailableError(f"{root} cannot be listed: {error.strerror}") from error
        begun, self._partly_removed = self._partly_removed, set()
        for entry in entries:
            pod, _, container = entry.name.partition("_")
            if not container or pod in live:
                continue
            with contextlib.suppress(OSError):
                age_s = abs(now - entry.lstat().st_mtime)
                if age_s < self.timing.new_files_s and entry.name not in begun:
                    continue
                self._partly_removed.add(entry.name)
                if entry.is_dir() and not entry.is_symlink():
                    remove_tree(entry)
                else:
                    entry.unlink()
                self._partly_removed.remove(entry.name)


def _make_shared(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if directory.stat().st_mode & SHARED_MODE != SHARED_MODE:
        directory.chmod(SHARED_MODE)


def _ensure(path: Path, content: bytes) -> None:
    """What a container has open is not changed."""
    if not path.is_file() or path.read_bytes() != content:
        replace_file(path, content)
