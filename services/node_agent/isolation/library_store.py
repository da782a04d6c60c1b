"""Versions of HAMi-core's library on this node: a directory per content, and which one is current.

Containers map the file, so an existing file is never changed: other content is written to another
directory, atomically. Versions that no container mounts any more are removed.
"""

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from shared.dialects.hami_core import LIBRARY_NAME
from shared.model.errors import UnavailableError

CURRENT = "current"
"""A file with the directory and the version of the library that new containers mount."""
_BLOCK = 1 << 20
_NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLibrary:
    """One content of the library."""

    path: Path
    """Below the store, in a directory that is named after the content."""
    version: str = ""
    """From the name of its source, such as `v2.9.0` of libvgpu.so.v2.9.0; empty: unknown."""

    @property
    def content(self) -> str:
        """A part of the content's SHA-256, in 32 hexadecimal digits."""
        return self.path.parent.name


def source_file(source: Path) -> Path:
    """Return the library that `source` names: the file, or the best one in the directory.

    That is libvgpu.so or, where installers keep versions, the libvgpu.so.VERSION of the highest
    version. Returns libvgpu.so, which does not exist, for a directory that has neither.
    """
    if not source.is_dir():
        return source
    usual = source / LIBRARY_NAME
    versions = [] if usual.is_file() else sorted(source.glob(f"{LIBRARY_NAME}.*"), key=_numbers)
    return versions[-1] if versions else usual


def store_library(source: Path, root: Path) -> StoredLibrary:
    """Copy the library to the directory of its content, unless it exists; it is not current yet.

    Raises UnavailableError if the source cannot be read, or changes meanwhile, or the directory
    cannot be written.
    """
    draft = root / f".draft-{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        before = source.stat()
        content = _copy(source, draft)
        after = source.stat()
        if (before.st_ino, before.st_mtime_ns) != (after.st_ino, after.st_mtime_ns):
            raise UnavailableError(f"{source} changed while it was copied")
        place = root / content / LIBRARY_NAME
        if not place.is_file() or digest_of(place) != content:
            place.parent.mkdir(exist_ok=True)
            draft.chmod(0o644)
            draft.replace(place)
            _sync_directory(place.parent)
    except OSError as error:
        raise UnavailableError(f"{error.filename or source}: {error.strerror}") from error
    finally:
        draft.unlink(missing_ok=True)
    return StoredLibrary(path=place, version=source.name.removeprefix(LIBRARY_NAME).lstrip("."))


def current_library(root: Path) -> StoredLibrary:
    """Return the current library; without one, a path that does not exist."""
    try:
        content, _, version = (root / CURRENT).read_text().partition(" ")
    except OSError:
        content = version = ""
    return StoredLibrary(
        path=root / (Path(content.strip()).name or "none") / LIBRARY_NAME, version=version.strip()
    )


def set_current(root: Path, library: StoredLibrary) -> None:
    """Have new containers mount this library. Raises UnavailableError if it cannot be written."""
    draft = root / f".{CURRENT}-{os.getpid()}"
    try:
        draft.write_text(f"{library.content} {library.version}".strip())
        draft.replace(root / CURRENT)
        _sync_directory(root)
    except OSError as error:
        raise UnavailableError(f"{error.filename or root}: {error.strerror}") from error


def remove_unused_versions(
    root: Path, mounted: Collection[str], *, now: float, unused_s: float
) -> list[Path]:
    """Remove versions older than `unused_s` that are neither current nor mounted; return them."""
    in_use = {current_library(root).path.parent} | {Path(path).parent for path in mounted}
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


def _numbers(path: Path) -> tuple[int, ...]:
    return tuple(map(int, _NUMBERS.findall(path.name)))


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


def _sync_directory(directory: Path) -> None:
    """Flush the directory's entries to disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
