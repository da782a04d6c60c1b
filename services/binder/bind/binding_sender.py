"""Sending Bindings: a fixed number in parallel, each pod for itself.

A batch waits for its pods only so long; what is still under way goes on, and the batch's next
delivery finds it under way, or its verdict.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.binder.bind.binding import (
    BOUND,
    BindingOutcome,
    BindingResult,
    ObservedPod,
    binding_annotations,
    judge,
    needs_binding,
)
from shared.model.clock import Clock
from shared.model.errors import LeaseholdError
from shared.model.lease import Lease
from shared.model.names import PodUid

CONCURRENCY = 32
PATIENCE_S = 2.0
REMEMBERED = 8192
"""Verdicts kept for batches that are delivered again."""


class Pods(Protocol):
    """Pods at the API server."""

    async def bind_pod(  # noqa: PLR0917 - the API client's own order
        self,
        namespace: str,
        name: str,
        uid: str,
        node: str,
        annotations: Mapping[str, str],
        labels: Mapping[str, str] | None = None,
        traceparent: str | None = None,
    ) -> None:
        """Bind the pod with this uid, in one write. Raises what the answer means to us."""
        ...

    async def look(self, namespace: str, name: str) -> ObservedPod | None:
        """Return the pod as it is now, or None if there is none."""
        ...


@dataclass(frozen=True, slots=True)
class _Flight:
    lease: Lease
    annotations: Mapping[str, str]
    trace: str
    landed: asyncio.Future[BindingResult]


class BindingSender:
    """Bindings under way and done; `work` does the sending."""

    def __init__(
        self,
        pods: Pods,
        clock: Clock,
        *,
        concurrency: int = CONCURRENCY,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.pods = pods
        self.clock = clock
        self.concurrency = concurrency
        self.patience_s = patience_s
        self._queue: asyncio.Queue[_Flight] = asyncio.Queue()
        self._flights: OrderedDict[tuple[PodUid, int], _Flight] = OrderedDict()

    async def post(self, leases: Sequence[tuple[Lease, str]]) -> list[BindingResult]:
        """Bind the pods of these leases (each with its trace) and return their verdicts in order.

        One that is not known within `patience_s` seconds is UNKNOWN for now, and goes on.
        """
        landings = [self._depart(lease, trace) for lease, trace in leases]
        if landings:
            await asyncio.wait(landings, timeout=self.patience_s)
        return [
            landed.result()
            if landed.done()
            else BindingResult(BindingOutcome.UNKNOWN, "no answer yet")
            for landed in landings
        ]

    @property
    def under_way(self) -> int:
        """How many Bindings the API server has not answered yet."""
        return sum(not flight.landed.done() for flight in self._flights.values())

    async def work(self) -> None:
        """Send what is asked for until cancelled."""
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(self.concurrency):
                    workers.create_task(self._work())
        finally:
            for flight in self._flights.values():
                if not flight.landed.done():
                    flight.landed.set_result(
                        BindingResult(BindingOutcome.UNKNOWN, "sending was interrupted")
                    )
            self._flights.clear()
            self._queue = asyncio.Queue()

    def _depart(self, lease: Lease, trace: str) -> asyncio.Future[BindingResult]:
        key = (lease.pod, lease.version)
        flight = self._flights.get(key)
        if flight is None or _in_doubt(flight):
            annotations = binding_annotations(lease, self.clock.now())
            landed = asyncio.get_running_loop().create_future()
            flight = _Flight(lease, annotations, trace, landed)
            self._flights[key] = flight
            if needs_binding(lease):
                self._queue.put_nowait(flight)
            else:
                flight.landed.set_result(BOUND)
        return flight.landed

    async def _work(self) -> None:
        while True:
            flight = await self._queue.get()
            flight.landed.set_result(await self._bind(flight))
            self._forget_old()

    async def _bind(self, flight: _Flight) -> BindingResult:
        lease = flight.lease
        try:
            await self.pods.bind_pod(
                lease.namespace,
                lease.name,
                lease.pod,
                lease.node,
                flight.annotations,
                traceparent=flight.trace or None,
            )
        except LeaseholdError as error:
            return await self._settle(lease, error)
        return BOUND

    async def _settle(self, lease: Lease, error: LeaseholdError) -> BindingResult:
        try:
            seen = await self.pods.look(lease.namespace, lease.name)
        except LeaseholdError as unread:
            return BindingResult(BindingOutcome.UNKNOWN, f"{error}; and then {unread}")
        return judge(lease, error, seen)

    def _forget_old(self) -> None:
        while len(self._flights) > REMEMBERED:
            key, flight = next(iter(self._flights.items()))
            if not flight.landed.done():
                return
            del self._flights[key]


def _in_doubt(flight: _Flight) -> bool:
    return flight.landed.done() and flight.landed.result().outcome is BindingOutcome.UNKNOWN
