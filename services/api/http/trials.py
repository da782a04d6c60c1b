"""Trials of where pods would fit, which viewers take turns to request."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from typing import TypeVar

from services.api.api_call import ApiCall
from shared.credentials.shares import owner_of
from shared.credentials.turns import Turns

T = TypeVar("T")
SOON_S = 2.0
"""How long a request for a waiting pod waits for its turn to try it."""


class Trials:
    def __init__(self) -> None:
        self._turns = Turns()

    def turn(self, call: ApiCall) -> AbstractAsyncContextManager[None]:
        return self._turns.turn(owner_of(call.viewer.name))

    async def soon(self, call: ApiCall, trial: Callable[[], T]) -> T | None:
        """Return None if others' trials take long: the rest of the reply does not wait."""
        with suppress(TimeoutError):
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(SOON_S):
                    await stack.enter_async_context(self.turn(call))
                return await asyncio.to_thread(trial)
        return None
