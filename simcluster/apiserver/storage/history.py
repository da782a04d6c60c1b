"""The change history of one kind, and the watches that read it.

Watches share one history and have a position each, so a slow watch costs no memory and delays no
other watch. A watch whose position is no longer in the history gets 410, as in Kubernetes.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import islice

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.selectors import Selection
from simcluster.apiserver.storage.records import ObjectChange, ObjectEvent, ObjectRecord


class ChangeHistory:
    """The latest changes of one kind; `floor` is the oldest version to read from."""

    def __init__(self, *, window: int, floor: int) -> None:
        self.window = window
        self.floor = floor
        self.closed = False
        self._changes: list[ObjectChange] = []
        self._versions: list[int] = []
        self._dropped = 0
        self._waiting: dict[asyncio.Future[None], Selection] = {}

    def append(self, change: ObjectChange) -> None:
        """Add a change, drop the oldest ones, and wake the watches that select it.

        Before changes are dropped, all other watches are woken too. So a watch gets 410 for being
        slow, never for selecting objects that seldom change.
        """
        self._changes.append(change)
        self._versions.append(change.version)
        if len(self._changes) > 2 * self.window:
            self.drop(len(self._changes) - self.window)
        about_to_drop = len(self._changes) == 3 * self.window // 2
        for waiter, selection in list(self._waiting.items()):
            if (
                about_to_drop
                or _selects(change.before, selection)
                or _selects(change.after, selection)
            ):
                del self._waiting[waiter]
                if not waiter.done():
                    waiter.set_result(None)

    def close(self) -> None:
        """End all watches: there will be no further changes."""
        self.closed = True
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    def drop(self, count: int) -> None:
        """Drop the oldest `count` changes; watches that have not read them get 410."""
        if count:
            self.floor = self._versions[count - 1]
            self._dropped += count
            del self._changes[:count]
            del self._versions[:count]

    def compact(self) -> None:
        """Drop all changes."""
        self.drop(len(self._changes))

    def position_after(self, version: int) -> int:
        """Return the position of the first change later than `version`."""
        if version < self.floor:
            raise ApiError.expired(f"too old resource version: {version} ({self.floor})")
        return self._dropped + bisect_right(self._versions, version)

    def end_position(self) -> int:
        """Return the position after the last change."""
        return self._dropped + len(self._changes)

    def changes_from(self, position: int) -> Iterator[ObjectChange]:
        """Iterate over the changes from `position` on."""
        if position < self._dropped:
            raise ApiError.expired(f"too old resource version: the history starts at {self.floor}")
        return islice(self._changes, position - self._dropped, None)

    def changes_back_to(self, version: int) -> Iterator[ObjectChange]:
        """Iterate backwards over the changes later than `version`."""
        first = self.position_after(version) - self._dropped
        return (self._changes[at] for at in range(len(self._changes) - 1, first - 1, -1))

    def records_at(
        self, version: int, present: Mapping[str, ObjectRecord]
    ) -> dict[str, ObjectRecord]:
        """Return the records as of a version, by undoing all later changes."""
        records = dict(present)
        for change in self.changes_back_to(version):
            if change.before is None:
                records.pop(change.key, None)
            else:
                records[change.key] = change.before
        return records

    async def wait_for_change(
        self, position: int, selection: Selection, timeout_s: float | None = None
    ) -> None:
        """Wait for a selected change at `position` or after it.

        Also returns after the timeout, and sometimes without a reason.
        """
        if self.end_position() > position or self.closed:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = selection
        try:
            await asyncio.wait([waiter], timeout=timeout_s)
        finally:
            self._waiting.pop(waiter, None)


class WatchSubscription:
    """The position of one watch, and its selection."""

    def __init__(
        self,
        history: ChangeHistory,
        selection: Selection,
        position: int,
        initial: list[ObjectRecord],
    ) -> None:
        self.version = history.floor
        self._history = history
        self._selection = selection
        self._position = position
        self._initial = initial

    @property
    def closed(self) -> bool:
        """True when the kind is no longer served: read the remaining events, then stop."""
        return self._history.closed

    def poll(self) -> list[ObjectEvent]:
        """Return the events since the last call; 410 if they are no longer in the history."""
        events = [ObjectEvent("ADDED", record) for record in self._initial]
        self._initial = []
        for change in self._history.changes_from(self._position):
            self._position += 1
            self.version = change.version
            event = event_for(change, self._selection)
            if event is not None:
                events.append(event)
        return events

    async def wait(self, timeout_s: float | None = None) -> None:
        """Return when `poll` may have something to return, or after the timeout."""
        if not self._initial:
            await self._history.wait_for_change(self._position, self._selection, timeout_s)


def event_for(change: ObjectChange, selection: Selection) -> ObjectEvent | None:
    """Return the event that a watch with this selection gets for a change, or None.

    An object that stops matching is DELETED for the watch: its last matching state, at the version
    of the change. One that starts to match is ADDED.
    """
    was = _selects(change.before, selection)
    now = _selects(change.after, selection)
    if now:
        return ObjectEvent("MODIFIED" if was else "ADDED", change.latest)
    if not was or change.before is None:
        return None
    if change.after is None:
        return ObjectEvent("DELETED", change.latest)
    return ObjectEvent("DELETED", change.before.at_version(change.version))


def _selects(record: ObjectRecord | None, selection: Selection) -> bool:
    return record is not None and selection.matches(record.obj)
