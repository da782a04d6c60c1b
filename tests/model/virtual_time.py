"""An event loop and clocks in which time passes only when the model moves it."""

import asyncio
import heapq
from collections.abc import Callable
from typing import Any

EPOCH_S = 1_787_000_000.0
"""Unix seconds at the start of each run; in the past of the Redis server's own clock."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Threads run inline, timers fire when `advance` reaches them, nothing waits for real."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.scheduled = 0
        self._timers: list[float] = []
        super().__init__()

    def time(self) -> float:
        return self.now_s

    def call_soon(  # type: ignore[override]
        self, *args: Any, **options: Any
    ) -> asyncio.Handle:
        self.scheduled += 1
        return super().call_soon(*args, **options)

    def call_at(  # type: ignore[override]
        self, when: float, *args: Any, **options: Any
    ) -> asyncio.TimerHandle:
        heapq.heappush(self._timers, when)
        return super().call_at(when, *args, **options)

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
        """Run all tasks until each of them waits for a timer or for the model."""
        self.run_until_complete(self._idle())

    def advance(self, duration_s: float) -> None:
        """Let time pass: each timer fires at its own time."""
        until = self.now_s + duration_s
        self.settle()
        while self._timers and self._timers[0] <= until:
            self.now_s = max(self.now_s, heapq.heappop(self._timers))
            self.settle()
        self.now_s = until

    async def _idle(self) -> None:
        while True:
            before = self.scheduled
            await asyncio.sleep(0)
            if self.scheduled == before + 1:
                return


class ActorClock:
    """The clock of one process, which may be off."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.ahead_s = 0.0

    def now(self) -> float:
        return EPOCH_S + self.loop.now_s + self.ahead_s

    def ticks(self) -> float:
        return self.loop.now_s

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)
