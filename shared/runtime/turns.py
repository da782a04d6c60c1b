"""Whose turn is next: small pieces of work first, and owners one after the other."""

import asyncio
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

SIZES = (16 * 1024, 64 * 1024, 256 * 1024, 1024 * 1024)
"""Bounds of the sizes that wait together, in bytes. Who sends work may invent its owners, and small
work costs little."""
SMALLER_FIRST = 8
"""After so many turns for which something larger has waited, that has one."""


class SizedTurns:
    """Some turns at a time. Between two turns of an owner, each other of that size has one."""

    def __init__(self, at_once: int = 1) -> None:
        self._free = at_once
        self._waiting: list[OrderedDict[str, deque[asyncio.Future[None]]]] = [
            OrderedDict() for _ in range(len(SIZES) + 1)
        ]
        self._passed_over = [0] * len(self._waiting)
        """How often each size has waited while a smaller one had the turn."""

    @asynccontextmanager
    async def turn(self, owner: str, size: int = 0) -> AsyncIterator[None]:
        """Wait for the owner's turn with so many bytes, and hold it."""
        if self._free:
            self._free -= 1
        else:
            granted = asyncio.get_running_loop().create_future()
            waiting = self._waiting[bisect_left(SIZES, size)]
            waiting.setdefault(owner, deque()).append(granted)
            try:
                await granted
            except asyncio.CancelledError:
                if granted.done() and not granted.cancelled():
                    self._pass_on()
                raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """Give the turn to the owner who has waited longest since the last one."""
        while (size := self._next_size()) is not None:
            of_size = self._waiting[size]
            owner, waiting = of_size.popitem(last=False)
            granted = waiting.popleft()
            if waiting:
                of_size[owner] = waiting
            if not granted.done():
                granted.set_result(None)
                return
        self._free += 1

    def _next_size(self) -> int | None:
        sizes = [size for size, waiting in enumerate(self._waiting) if waiting]
        if not sizes:
            return None
        late = [size for size in sizes if self._passed_over[size] >= SMALLER_FIRST]
        chosen = max(late, default=sizes[0])
        self._passed_over[chosen] = 0
        for size in sizes:
            if size > chosen:
                self._passed_over[size] += 1
        return chosen
