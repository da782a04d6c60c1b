"""Looks at all GPUs, each in a thread of its own and under a time limit.

One that hangs or fails holds up no other, and is not asked again before it has come back.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from services.node_agent.faults import no_answer
from services.node_agent.inventory import Gpu
from services.node_agent.own_thread import begun
from shared.model.errors import LeaseholdError, UnavailableError

T = TypeVar("T")

AGAIN_S = 0.5
"""How often the limit is looked at."""


class Looking:
    """The GPUs that a driver lists, by its own changing numbers.

    `count` and `ask` block; `ask` returns None where there is no GPU, and both raise
    UnavailableError where the driver fails. A GPU that fails is shown as it was last seen, with
    that as its fault.
    """

    def __init__(
        self,
        count: Callable[[], int],
        ask: Callable[[int], Gpu | None],
        *,
        limit_s: Callable[[], float],
    ) -> None:
        self.count = count
        self.ask = ask
        self.limit_s = limit_s
        """How long an answer may take, as of now."""
        self._counting: asyncio.Future[int] | None = None
        self._asked: dict[int, asyncio.Future[Gpu | None]] = {}
        self._known: dict[int, Gpu] = {}

    async def look(self) -> tuple[Gpu, ...]:
        """Return all GPUs. Raises UnavailableError while nothing is known of any."""
        numbers = range(await self._count())
        seen = await asyncio.gather(*(self._one(number) for number in numbers))
        answers = [one for one in seen if isinstance(one, Gpu)]
        sound = {gpu.uuid for gpu in answers if gpu.fault is None}
        found = {gpu.uuid: gpu for gpu in answers if gpu.fault is None or gpu.uuid not in sound}
        errors = [one for one in seen if isinstance(one, UnavailableError)]
        if errors and not found:
            raise errors[0]
        return tuple(found.values())

    async def _count(self) -> int:
        if self._counting is None or self._counting.done():
            self._counting = begun(self.count, LeaseholdError)
        return await self._in_time(self._counting)

    async def _one(self, number: int) -> Gpu | UnavailableError | None:
        asked = self._asked.get(number)
        if asked is None or asked.done():
            asked = self._asked[number] = begun(lambda: self.ask(number), LeaseholdError)
        try:
            gpu = await self._in_time(asked)
        except UnavailableError as error:
            known = self._known.get(number)
            return error if known is None else replace(known, fault=no_answer(str(error)))
        if gpu is None:
            self._known.pop(number, None)
        else:
            self._known[number] = gpu
        return gpu

    async def _in_time(self, answer: asyncio.Future[T]) -> T:
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not answer.done():
            limit_s = self.limit_s()
            left_s = began + limit_s - loop.time()
            if left_s <= 0:
                raise UnavailableError(
                    f"the NVIDIA driver did not answer within {limit_s:g} s: look at "
                    "`nvidia-smi` and at the kernel log for Xid messages"
                )
            await asyncio.wait({answer}, timeout=min(left_s, AGAIN_S))
        return answer.result()
