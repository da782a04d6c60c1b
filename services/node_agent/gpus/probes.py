"""Probes of all GPUs: one that hangs delays no other, and is not read again until it returns."""

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

from services.node_agent.gpus.device_faults import SAME_INDEX, no_response
from services.node_agent.gpus.inventory import Gpu, problem_of
from services.node_agent.gpus.worker_threads import SingleFlight
from shared.model.errors import LeaseholdError, UnavailableError

logger = logging.getLogger(__name__)

_COUNT = "count"
T = TypeVar("T")


class GpuReader(Generic[T]):
    """Reads all GPUs that a driver lists, by its own index, which may change.

    `count` and `read` block, and raise UnavailableError if the driver fails; `read` returns None if
    there is no GPU at an index.
    """

    def __init__(
        self,
        count: Callable[[], int],
        read: Callable[[int], T | None],
        *,
        limit_s: Callable[[], float],
    ) -> None:
        self.count = count
        self.read = read
        self.limit_s = limit_s
        self._count_calls: SingleFlight[int] = SingleFlight()
        self._read_calls: SingleFlight[T | None] = SingleFlight()
        self._count = 0

    async def read_all(self) -> dict[int, T | LeaseholdError | None]:
        """Raises UnavailableError while the number of GPUs is not known."""
        self._count_calls.start({_COUNT: self.count})
        self._read_calls.start(reads := self._reads(self._count))
        count = await self._count_calls.call(_COUNT, self.count, self.limit_s)
        if count != self._count:
            self._read_calls.start(reads := self._reads(count))
        self._count = count
        return await self._read_calls.call_each(reads, self.limit_s)

    def _reads(self, count: int) -> dict[int, Callable[[], T | None]]:
        return {number: functools.partial(self.read, number) for number in range(count)}


class GpuProber:
    """A GPU that fails is returned as it was last read, with that fault."""

    def __init__(
        self,
        count: Callable[[], int],
        read: Callable[[int], Gpu | None],
        *,
        limit_s: Callable[[], float],
    ) -> None:
        self._reader = GpuReader(count, read, limit_s=limit_s)
        self.unreadable: dict[int, str] = {}
        """A GPU that never responded is not returned."""
        self._known: dict[int, Gpu] = {}

    async def probe(self) -> tuple[Gpu, ...]:
        """Raises UnavailableError while no GPU is known."""
        readings = await self._reader.read_all()
        results = {number: self._checked(number, result) for number, result in readings.items()}
        errors = {
            n: result for n, result in results.items() if isinstance(result, UnavailableError)
        }
        observed = [self._observe(number, result) for number, result in results.items()]
        gpus = _unique_gpus([gpu for gpu in observed if gpu is not None])
        if errors and not gpus:
            raise next(iter(errors.values()))
        self._log_unreadable({number: str(error) for number, error in errors.items()})
        return gpus

    def _log_unreadable(self, unreadable: dict[int, str]) -> None:
        for number, reason in unreadable.items():
            if number not in self.unreadable and number not in self._known:
                logger.warning(
                    "the GPU with driver index %d is not served, as it has never responded: %s",
                    number,
                    reason,
                )
        self.unreadable = unreadable

    def _checked(
        self, number: int, reading: Gpu | Exception | None
    ) -> Gpu | UnavailableError | None:
        if isinstance(reading, Exception) and not isinstance(reading, UnavailableError):
            raise reading
        if isinstance(reading, Gpu) and reading != self._known.get(number):
            problem = problem_of(reading)
            return UnavailableError(problem) if problem else reading
        return reading

    def _observe(self, number: int, reading: Gpu | UnavailableError | None) -> Gpu | None:
        if isinstance(reading, UnavailableError):
            last = self._known.get(number)
            return None if last is None else replace(last, fault=no_response(str(reading)))
        if reading is None:
            self._known.pop(number, None)
            return None
        if reading != self._known.get(number):  # else the known one, which is compared faster later
            self._known[number] = reading
        return self._known[number]


def _unique_gpus(gpus: list[Gpu]) -> tuple[Gpu, ...]:
    """A sound GPU comes before a failing one of its UUID, last read at another index.

    Of sound ones with the same minor number, all but the first are faulty.
    """
    sound = {gpu.uuid for gpu in gpus if gpu.fault is None}
    unique = {gpu.uuid: gpu for gpu in gpus if gpu.fault is None or gpu.uuid not in sound}
    first = {gpu.index: gpu.uuid for gpu in reversed(unique.values()) if gpu.fault is None}
    return tuple(
        gpu if gpu.fault or first[gpu.index] == gpu.uuid else replace(gpu, fault=SAME_INDEX)
        for gpu in unique.values()
    )
