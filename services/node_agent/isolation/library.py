"""HAMi-core's library on this node: follows its source, and installs what enforces limits."""

import asyncio
import logging
import time
from collections.abc import Collection
from pathlib import Path

from services.node_agent.isolation.library_check import layout_name, unusable_reason
from services.node_agent.isolation.library_store import (
    StoredLibrary,
    current_library,
    remove_unused_versions,
    set_current,
    source_file,
    store_library,
)
from services.node_agent.metrics import library_shown
from shared.dialects.hami_core import LIBRARY_NAME
from shared.model.errors import UnavailableError

logger = logging.getLogger(__name__)

Identity = tuple[int, ...]
"""Inode, size and time of change of a file; empty: it does not exist."""


class NodeLibrary:
    """The library that new containers mount.

    A library is installed only if it loads and has the layout of our regions; otherwise the
    current one stays. Without a source, GPUs are simulated, and it is an empty file.
    """

    def __init__(self, root: Path, source: Path | None) -> None:
        self.root = root
        self.source = source
        self.current = current_library(root) if source else simulated_library(root)
        """What new containers mount; it may not exist."""
        self.unusable_reason = ""
        """Why it cannot enforce limits; empty: it can, or nothing has been checked yet."""
        self._checked: tuple[Identity, Identity] | None = None
        """The source and the current library at the last check."""
        self._reported = ""

    @property
    def simulated(self) -> bool:
        """Whether it enforces nothing, and must not be preloaded: the loader would warn."""
        return self.source is None

    async def update(self) -> bool:
        """Install the source if it has changed; return whether limits can be enforced."""
        if self.source is None:
            exists = self.current.path.is_file()
            self.unusable_reason = "" if exists else f"{self.current.path} does not exist"
            return exists
        source, before, current = await asyncio.to_thread(self._look, self.source)
        if self._checked != (before, current):
            await self._install(source)
            self._checked = (before, await asyncio.to_thread(_identity, self.current.path))
        return not self.unusable_reason

    def _look(self, origin: Path) -> tuple[Path, Identity, Identity]:
        source = source_file(origin)
        return source, _identity(source), _identity(self.current.path)

    async def remove_unused(self, mounted: Collection[str], *, unused_s: float) -> None:
        """Remove versions older than `unused_s` that are neither current nor mounted."""
        if self.source is not None:
            await asyncio.to_thread(
                remove_unused_versions, self.root, mounted, now=time.time(), unused_s=unused_s
            )

    async def _install(self, source: Path) -> None:
        wrong = await self._install_usable(source)
        self.current = await asyncio.to_thread(current_library, self.root)
        self.unusable_reason = ""
        if wrong and (own := await unusable_reason(self.current.path)):
            exists = self.current.path.is_file()
            self.unusable_reason = f"{self.current.path} is unusable: {own}" if exists else wrong
        layout = await asyncio.to_thread(layout_name, self.current.path)
        facts = (self.current.version, layout, self.current.content)
        library_shown(None if self.unusable_reason else facts)
        text = _report(self.current, source, wrong, self.unusable_reason)
        if text != self._reported:
            logger.log(logging.WARNING if wrong else logging.INFO, text)
        self._reported = text

    async def _install_usable(self, source: Path) -> str:
        """Make the source the current library, or return why not."""
        try:
            stored = await asyncio.to_thread(store_library, source, self.root)
            if wrong := await unusable_reason(stored.path):
                return f"{source} is unusable: {wrong}"
            await asyncio.to_thread(set_current, self.root, stored)
        except UnavailableError as error:
            return str(error)
        return ""


def simulated_library(root: Path) -> StoredLibrary:
    """Return the empty file that stands for the library of simulated GPUs."""
    return StoredLibrary(path=root / "simulated" / LIBRARY_NAME)


def _report(current: StoredLibrary, source: Path, wrong: str, unusable: str) -> str:
    """Return the log line of an installation."""
    if unusable:
        return f"only whole GPUs and MIG instances are allocated, not shares: {unusable}"
    if wrong:
        return f"containers still mount {current.path}: {wrong}"
    return f"containers mount {current.path}, installed from {source}"


def _identity(path: Path) -> Identity:
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns
