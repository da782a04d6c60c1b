"""Looks at all GPUs, each in a thread of its own and under a time limit.

One that hangs or fails holds up no other, and is not asked again before it has come back.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from services.node_agent.gpus.device_faults import no_response
from services.node_agent.gpus.inventory import Gpu
from services.node_agent.gpus.worker_threads import SingleFlight
from shared.model.errors import LeaseholdError, UnavailableError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_COUNT = "count"


class GpuProber:
    """The GPUs that a driver lists, by its own changing numbers.

    `count` and `ask` block; `ask` returns None where there is no GPU, and both raise
    UnavailableError where the driver fails. A GPU that fails is shown as it was last seen, with
    that as its fault.
    """

    def __init__(
        self,
        count: Callable[[], int],
        read: Callable[[int], Gpu | None],
        *,
        limit_s: Callable[[], float],
    ) -> None:
        self.count = count
        self.ask = read
        self.limit_s = limit_s
        """How long an answer may take, as of now."""
        self.unreadable: dict[int, str] = {}
        """By number, why GPUs are not among those of the last look: none has ever answered."""
        self._count_calls: SingleFlight[int] = SingleFlight(LeaseholdError)
        self._read_calls: SingleFlight[Gpu | None] = SingleFlight(LeaseholdError)
        self._known: dict[int, Gpu] = {}

    async def probe(self) -> tuple[Gpu, ...]:
        """Return all GPUs. Raises UnavailableError while nothing is known of any."""
        count = await self._call(self._count_calls, _COUNT, self.count)
        seen = await asyncio.gather(*(self._probe_one(number) for number in range(count)))
        answers = [one for one in seen if isinstance(one, Gpu)]
        sound = {gpu.uuid for gpu in answers if gpu.fault is None}
        found = {gpu.uuid: gpu for gpu in answers if gpu.fault is None or gpu.uuid not in sound}
        errors = {n: one for n, one in enumerate(seen) if isinstance(one, UnavailableError)}
        if errors and not found:
            raise next(iter(errors.values()))
        self._log_unreadable({number: str(error) for number, error in errors.items()})
        return tuple(found.values())

    def _log_unreadable(self, unseen: dict[int, str]) -> None:
        for number, why in unseen.items():
            if number not in self.unreadable:
                logger.warning(
                    "number %d of the driver's GPUs is not served, as it has never answered: %s",
                    number,
                    why,
                )
        self.unreadable = unseen

    async def _probe_one(self, number: int) -> Gpu | UnavailableError | None:
        try:
            gpu = await self._call(self._read_calls, number, lambda: self.ask(number))
        except UnavailableError as error:
            known = self._known.get(number)
            return error if known is None else replace(known, fault=no_response(str(error)))
        if gpu is None:
            self._known.pop(number, None)
        else:
            self._known[number] = gpu
        return gpu

    async def _call(
        self, questions: SingleFlight[T], about: int | str, question: Callable[[], T]
    ) -> T:
        try:
            return await questions.call(about, question, self.limit_s)
        except TimeoutError as error:
            raise UnavailableError(
                f"the NVIDIA driver did not answer within {self.limit_s():g} s: look at "
                "`nvidia-smi` and at the kernel log for Xid messages"
            ) from error
