"""Turns of work that keeps the processor busy: one at a time, each owner as often as any other."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairTurns:
    """Owners with much work wait for themselves: between two turns of one, each other has one."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._busy = False

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Wait for the owner's turn, and hold it."""
        if self._busy:
            granted = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(owner, deque()).append(granted)
            try:
                await granted
            except asyncio.CancelledError:
                if granted.done() and not granted.cancelled():
                    self._pass_on()
                raise
        self._busy = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """Give the turn to the owner who has waited longest since the last one."""
        while self._waiting:
            owner, waiting = self._waiting.popitem(last=False)
            granted = waiting.popleft()
            if waiting:
                self._waiting[owner] = waiting
            if not granted.done():
                granted.set_result(None)
                return
        self._busy = False
