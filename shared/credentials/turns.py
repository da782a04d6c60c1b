"""Turns: small pieces of work first, and owners one after the other."""

import asyncio
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shared.model.errors import RequestError

SIZES = (16 * 1024, 64 * 1024, 256 * 1024, 1024 * 1024)
"""In bytes. A sender may invent its owners, and small work costs little."""
SMALLER_FIRST = 8
"""After so many turns for which something larger has waited, the larger has one."""

_Waiting = dict[asyncio.Future[None], None]
"""In order of arrival."""


class TooManyRequestsError(RequestError):
    """A sender uses its share already, or all is in use."""


class Turns:
    """Between two turns of an owner, each other owner with waiting work of that size has one.

    `at_once` turns are held at the same time, `of_one` of them by the same owner, which may have
    `most_waiting` pieces of work waiting.
    """

    def __init__(
        self, at_once: int = 1, *, of_one: int | None = None, most_waiting: int | None = None
    ) -> None:
        self._at_once = at_once
        self._of_one = at_once if of_one is None else of_one
        self._most_waiting = most_waiting
        self._held: Counter[str] = Counter()
        self._waiting: list[OrderedDict[str, _Waiting]] = [
            OrderedDict() for _ in range(len(SIZES) + 1)
        ]
        """By size, then by owner: the owner that has waited longest since its last turn first."""
        self._passed_over = [0] * len(self._waiting)

    @asynccontextmanager
    async def turn(self, owner: str, size: int = 0) -> AsyncIterator[None]:
        """Raises TooManyRequestsError."""
        if self._may_hold(owner):
            self._held[owner] += 1
        else:
            await self._wait(owner, bisect_left(SIZES, size))
        try:
            yield
        finally:
            self._release(owner)

    async def _wait(self, owner: str, size: int) -> None:
        if self._most_waiting is not None:
            count = sum(len(of_size.get(owner, ())) for of_size in self._waiting)
            if count >= self._most_waiting:
                raise TooManyRequestsError(
                    f"{count} requests of {owner} wait, the most at a time: send fewer at once"
                )
        granted = asyncio.get_running_loop().create_future()
        self._waiting[size].setdefault(owner, {})[granted] = None
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._release(owner)
            else:
                self._remove(owner, size, granted)
            raise

    def _may_hold(self, owner: str) -> bool:
        return self._held.total() < self._at_once and self._held[owner] < self._of_one

    def _release(self, owner: str) -> None:
        """Give the turn to the owner that has waited longest since its last one."""
        self._held[owner] -= 1
        self._held += Counter()  # without those that are 0
        while (candidate := self._next()) is not None:
            next_owner, size = candidate
            granted = next(iter(self._waiting[size][next_owner]))
            self._remove(next_owner, size, granted)
            if next_owner in self._waiting[size]:
                self._waiting[size].move_to_end(next_owner)
            if not granted.done():  # it is if its task was cancelled just now
                self._held[next_owner] += 1
                granted.set_result(None)
                return

    def _next(self) -> tuple[str, int] | None:
        owners: dict[int, str] = {}
        for size, waiting in enumerate(self._waiting):
            owner = next((name for name in waiting if self._may_hold(name)), None)
            if owner is not None:
                owners[size] = owner
        chosen = self._next_size([*owners])
        return None if chosen is None else (owners[chosen], chosen)

    def _remove(self, owner: str, size: int, granted: asyncio.Future[None]) -> None:
        waiting = self._waiting[size].get(owner, {})
        waiting.pop(granted, None)
        if not waiting:
            self._waiting[size].pop(owner, None)

    def _next_size(self, sizes: list[int]) -> int | None:
        if not sizes:
            return None
        late = [size for size in sizes if self._passed_over[size] >= SMALLER_FIRST]
        chosen = max(late, default=sizes[0])
        self._passed_over[chosen] = 0
        for size in sizes:
            if size > chosen:
                self._passed_over[size] += 1
        return chosen
