"""Shows something once, or (`--watch`) again whenever it changes."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from services.cli.snapshot.flagged_reader import ClusterReader

T = TypeVar("T")
INTERVAL_S = 2.0
CHANGING = frozenset({"measured", "text", "dominant_share"})
"""Keys of documents that change all the time: usage, and texts with ages."""


@dataclass(frozen=True, slots=True)
class Shown(Generic[T]):
    """What a command reads, the document of it whose change counts, and how it is shown."""

    read: Callable[[ClusterReader], Awaitable[T]]
    document: Callable[[T], dict[str, Any]]
    show: Callable[[T], None]

    def once_or_watched(self, *, watch: bool) -> Callable[[ClusterReader], Awaitable[T]]:
        """Return what shows it once and returns it; with `watch`, until it is interrupted."""

        async def showing(reader: ClusterReader) -> T:
            found = await self.read(reader)
            self._show_now(found)
            before = _lasting(self.document(found))
            while watch:
                await asyncio.sleep(INTERVAL_S)
                found = await self.read(reader)
                after = _lasting(self.document(found))
                if after != before:
                    before = after
                    print()
                    self._show_now(found)
            return found

        return showing

    def _show_now(self, found: T) -> None:
        self.show(found)
        sys.stdout.flush()


def _lasting(document: Any) -> Any:
    """Return a document without what changes all the time."""
    if isinstance(document, dict):
        return {key: _lasting(value) for key, value in document.items() if key not in CHANGING}
    if isinstance(document, list):
        return [_lasting(value) for value in document]
    return document
