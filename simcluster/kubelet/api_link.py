"""The kubelet's way to its API server, which may be away for a while.

A real kubelet asks the API server who may read its `/pods`, and remembers the answer. While the API
server is away, it responds 500; an API server that has just started may deny what it permits later,
and the kubelet remembers that for 30 s. Its statuses are written as soon as the API server is back,
but its own watch of pods is established only after a pause, which grows while the API server is
away: until then `/pods` shows the pods as they were before.
"""

import asyncio
import time
from collections.abc import Callable

from simcluster.ports import Outage


class ApiLink:
    """What of the API server a kubelet reaches."""

    def __init__(self) -> None:
        self.there = asyncio.Event()
        """Single requests are answered."""
        self.watched = asyncio.Event()
        """So is the watch of pods."""
        self.lost = asyncio.Event()
        """The watch of pods has ended."""
        self.on_lost: Callable[[], None] = lambda: None
        """Called before the watch of pods ends."""
        self._denied_until = 0.0
        self.find()

    @property
    def code(self) -> int:
        """The status code of a request that asks the API server for permission."""
        if not self.there.is_set():
            return 500
        return 403 if time.monotonic() < self._denied_until else 200

    async def miss(self, outage: Outage) -> None:
        """Lose the API server, and find it again."""
        self.lose()
        await asyncio.sleep(outage.for_s)
        self.there.set()
        self._denied_until = time.monotonic() + outage.denied_s
        await asyncio.sleep(outage.relist_s)
        self.find()

    def lose(self) -> None:
        """Lose the API server."""
        self.on_lost()
        self.there.clear()
        self.watched.clear()
        self.lost.set()

    def find(self) -> None:
        """Reach the API server, and watch the pods again."""
        self.there.set()
        self.watched.set()
        self.lost.clear()
