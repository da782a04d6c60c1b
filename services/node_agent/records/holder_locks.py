"""Locks by pod or ResourceClaim: what is slow for one of them keeps no other one waiting."""

import asyncio
from collections.abc import AsyncIterator, Set
from contextlib import AsyncExitStack, asynccontextmanager
from weakref import WeakValueDictionary

from shared.model.names import PodUid


class HolderLocks:
    def __init__(self) -> None:
        self._locks = WeakValueDictionary[PodUid, asyncio.Lock]()

    def is_held(self, holder: PodUid) -> bool:
        return holder in self._locks

    @asynccontextmanager
    async def hold(self, holder: PodUid) -> AsyncIterator[None]:
        async with self._locks.setdefault(holder, asyncio.Lock()):
            yield

    @asynccontextmanager
    async def hold_free(self, holders: Set[PodUid]) -> AsyncIterator[Set[PodUid]]:
        """If none is free, wait for one; a caller takes the rest in a next round."""
        free = {holder for holder in holders if not self.is_held(holder)}
        taken = free or set(sorted(holders)[:1])
        async with AsyncExitStack() as stack:
            for holder in taken:
                await stack.enter_async_context(self.hold(holder))
            yield taken
