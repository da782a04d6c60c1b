"""An event loop and clocks in which time passes only when the model moves it."""

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import Any

EPOCH_S = 1_787_000_000.0
"""Unix seconds at the start of each run."""
READ_EVERY_S = 10.0
"""How often a service reads the time of the Redis server."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Threads run inline, timers fire when `advance` reaches them, nothing waits for real."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__()

    def time(self) -> float:
        return self.now_s

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> Any:
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except OSError as error:
            done.set_exception(error)
        return done

    def settle(self) -> None:
        """Run all tasks until each of them waits for a timer or for the model.

        Shorter than `run_forever`, which waits for sockets: most of a run is spent here.
        """
        asyncio._set_running_loop(self)
        try:
            while self._next_timer_s() <= self.now_s or self._ready:
                while self._next_timer_s() <= self.now_s:
                    self._ready.append(heapq.heappop(self._scheduled))
                for _ in range(len(self._ready)):
                    handle = self._ready.popleft()
                    if not handle.cancelled():
                        handle._run()
        finally:
            asyncio._set_running_loop(None)

    def advance(self, duration_s: float) -> None:
        """Let time pass: each timer fires at its own time."""
        until = self.now_s + duration_s
        self.settle()
        while self._next_timer_s() <= until:
            self.now_s = self._next_timer_s()
            self.settle()
        self.now_s = until

    def _next_timer_s(self) -> float:
        while self._scheduled and self._scheduled[0].cancelled():
            heapq.heappop(self._scheduled)
        return self._scheduled[0].when() if self._scheduled else math.inf


class ActorClock:
    """The clock of a host, which may jump."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.ahead_s = 0.0

    def now(self) -> float:
        return EPOCH_S + self.loop.now_s + self.ahead_s

    def ticks(self) -> float:
        return self.loop.now_s

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)


class LedgerTime(ActorClock):
    """The clock of a service: the Redis server's, as it was read some seconds ago."""

    def __init__(self, loop: VirtualLoop, server: ActorClock) -> None:
        super().__init__(loop)
        self.server = server
        self._read_at = -READ_EVERY_S

    def now(self) -> float:
        if self.loop.now_s >= self._read_at + READ_EVERY_S:
            self._read_at = self.loop.now_s
            self.ahead_s = self.server.ahead_s
        return super().now()
