"""Persistence of the store: one SQLite table.

Every write reaches the operating system before it is acknowledged, so a killed process loses
nothing. A power failure may lose writes, which is acceptable for a simulated cluster.
"""

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StoredRow:
    """One stored object; `body` is its JSON."""

    resource: str
    key: str
    version: int
    body: bytes


class StorageBackend(Protocol):
    """Persists the last version of each object, and the highest version."""

    def rows(self) -> Iterator[StoredRow]:
        """Iterate over all stored objects."""
        ...

    def last_version(self) -> int:
        """Return the highest version ever written."""
        ...

    def write(self, resource: str, key: str, version: int, body: bytes | None) -> None:
        """Store one object, or remove it if `body` is None; durable on return."""
        ...

    def close(self) -> None:
        """Release the file."""
        ...


class InMemoryBackend:
    """Persists nothing: for tests, and for clusters that end with their process."""

    def rows(self) -> Iterator[StoredRow]:
        """Return no rows."""
        return iter(())

    def last_version(self) -> int:
        """Return 0: each process starts empty."""
        return 0

    def write(self, resource: str, key: str, version: int, body: bytes | None) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class SqliteBackend:
    """A file with a row per object, and one row for the highest version."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=OFF")
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS objects (resource TEXT, key TEXT, version INTEGER,"
            " body BLOB, PRIMARY KEY (resource, key)) WITHOUT ROWID"
        )

    def rows(self) -> Iterator[StoredRow]:
        """Iterate over the objects in key order."""
        query = "SELECT resource, key, version, body FROM objects WHERE resource != ''"
        return (StoredRow(*columns) for columns in self._db.execute(query))

    def last_version(self) -> int:
        """Return the highest version ever written, deletions included."""
        version = self._db.execute("SELECT max(version) FROM objects").fetchone()[0]
        return int(version or 0)

    def write(self, resource: str, key: str, version: int, body: bytes | None) -> None:
        """Store or remove one object; a removal writes its version to the counter row."""
        if body is not None:
            self._db.execute(
                "INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?)", (resource, key, version, body)
            )
            return
        self._db.execute("BEGIN")
        self._db.execute("DELETE FROM objects WHERE resource = ? AND key = ?", (resource, key))
        self._db.execute("INSERT OR REPLACE INTO objects VALUES ('', '', ?, x'')", (version,))
        self._db.execute("COMMIT")

    def close(self) -> None:
        """Close the file."""
        self._db.close()
