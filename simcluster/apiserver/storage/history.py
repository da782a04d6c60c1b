"""The last changes of one kind, and where each watcher has got to in them.

Watchers share the log and keep a position each, so that a slow one costs no memory and no
other watcher: when the log has moved past its position it gets 410, as from a real API server.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import islice

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.selectors import Selection
from simcluster.apiserver.storage.records import Change, Record, WatchEvent


class History:
    """A window of changes; `floor` is the oldest version from which it can still be read."""

    def __init__(self, *, window: int, floor: int) -> None:
        self.window = window
        self.floor = floor
        self.is_over = False
        self._changes: list[Change] = []
        self._versions: list[int] = []
        self._dropped = 0
        self._waiting: dict[asyncio.Future[None], Selection] = {}

    def append(self, change: Change) -> None:
        """Add a change, forget the oldest ones, wake the watchers whom it concerns.

        The others are woken before what they have not looked at is forgotten, so that a watcher
        is told 410 for being slow, never for watching something that seldom changes.
        """
        self._changes.append(change)
        self._versions.append(change.version)
        if len(self._changes) > 2 * self.window:
            self.drop(len(self._changes) - self.window)
        crowded = len(self._changes) == 3 * self.window // 2
        for waiter, chosen in list(self._waiting.items()):
            if crowded or _shows(change.before, chosen) or _shows(change.after, chosen):
                del self._waiting[waiter]
                if not waiter.done():
                    waiter.set_result(None)

    def end_watches(self) -> None:
        """Let nobody wait any longer: there is nothing more to come."""
        self.is_over = True
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    def drop(self, count: int) -> None:
        """Forget the oldest `count` changes; watchers still before them get 410."""
        if count:
            self.floor = self._versions[count - 1]
            self._dropped += count
            del self._changes[:count]
            del self._versions[:count]

    def compact(self) -> None:
        """Forget everything up to now."""
        self.drop(len(self._changes))

    def position_after(self, version: int) -> int:
        """Return the position of the first change later than `version`."""
        if version < self.floor:
            raise ApiError.expired(f"too old resource version: {version} ({self.floor})")
        return self._dropped + bisect_right(self._versions, version)

    def end(self) -> int:
        """Return the position behind the last change."""
        return self._dropped + len(self._changes)

    def since(self, position: int) -> Iterator[Change]:
        """Iterate over the changes from `position` on."""
        if position < self._dropped:
            raise ApiError.expired(f"too old resource version: the history starts at {self.floor}")
        return islice(self._changes, position - self._dropped, None)

    def undone(self, version: int) -> Iterator[Change]:
        """Iterate backwards over the changes later than `version`."""
        first = self.position_after(version) - self._dropped
        return (self._changes[at] for at in range(len(self._changes) - 1, first - 1, -1))

    def as_of(self, version: int, present: Mapping[str, Record]) -> dict[str, Record]:
        """Return the records there were at a version, by undoing what changed since."""
        records = dict(present)
        for change in self.undone(version):
            if change.before is None:
                records.pop(change.key, None)
            else:
                records[change.key] = change.before
        return records

    async def wait_beyond(
        self, position: int, chosen: Selection, timeout_s: float | None = None
    ) -> None:
        """Return when there is a change of what is chosen at `position` or after it.

        Also returns when the time is over, and sometimes without a reason.
        """
        if self.end() > position or self.is_over:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = chosen
        try:
            await asyncio.wait([waiter], timeout=timeout_s)
        finally:
            self._waiting.pop(waiter, None)


class Subscription:
    """One watcher's position, and the selection through which it looks."""

    def __init__(
        self, history: History, chosen: Selection, position: int, initial: list[Record]
    ) -> None:
        self.version = history.floor
        self._history = history
        self._chosen = chosen
        self._position = position
        self._initial = initial

    @property
    def is_over(self) -> bool:
        """True when the kind is no longer served: take what is left, then stop."""
        return self._history.is_over

    def take(self) -> list[WatchEvent]:
        """Return what has happened since the last call; raises 410 when that is forgotten."""
        events = [WatchEvent("ADDED", record) for record in self._initial]
        self._initial = []
        for change in self._history.since(self._position):
            self._position += 1
            self.version = change.version
            event = transition(change, self._chosen)
            if event is not None:
                events.append(event)
        return events

    async def wait(self, timeout_s: float | None = None) -> None:
        """Return when `take` may have something to return, or the time is over."""
        if not self._initial:
            await self._history.wait_beyond(self._position, self._chosen, timeout_s)


def transition(change: Change, chosen: Selection) -> WatchEvent | None:
    """Say what a change looks like through a selection.

    An object that stops matching is DELETED for this watcher, shown as it was while it still
    matched but at the version at which it stopped; one that starts to match is ADDED.
    """
    was, now = _shows(change.before, chosen), _shows(change.after, chosen)
    if now:
        return WatchEvent("MODIFIED" if was else "ADDED", change.last)
    if not was or change.before is None:
        return None
    if change.after is None:
        return WatchEvent("DELETED", change.last)
    return WatchEvent("DELETED", change.before.at_version(change.version))


def _shows(record: Record | None, chosen: Selection) -> bool:
    return record is not None and chosen.matches(record.obj)
