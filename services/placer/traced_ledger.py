"""The placer's ledger with a trace span for each pod's reservation."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from shared.ledger.leases import RedisLeases
from shared.model.ledger import Reservation, ReservationOutcome, Reserved
from shared.model.request import Gang
from shared.runtime import telemetry


class TracedLedger(RedisLeases):
    """The ledger; spans of a lease become children of the span of its reservation."""

    tracing: telemetry.Tracing

    async def reserve(
        self, wanted: Sequence[Reservation], *, now: float, ttl_s: float
    ) -> list[ReservationOutcome]:
        """Reserve a group within spans named `placer reserve`, one for each pod."""
        return await self._within_spans(
            wanted, lambda traced: RedisLeases.reserve(self, traced, now=now, ttl_s=ttl_s)
        )

    async def reserve_gang(
        self, gang: Gang, wanted: Sequence[Reservation], *, now: float, ttl_s: float
    ) -> list[ReservationOutcome]:
        """Reserve a gang within the same spans."""
        return await self._within_spans(
            wanted,
            lambda traced: RedisLeases.reserve_gang(self, gang, traced, now=now, ttl_s=ttl_s),
        )

    async def reserve_further(
        self, gang: Gang, wanted: Sequence[Reservation], *, now: float, ttl_s: float
    ) -> list[ReservationOutcome]:
        """Reserve for further pods of a gang within the same spans."""
        return await self._within_spans(
            wanted,
            lambda traced: RedisLeases.reserve_further(self, gang, traced, now=now, ttl_s=ttl_s),
        )

    async def _within_spans(
        self,
        wanted: Sequence[Reservation],
        reserve: Callable[[Sequence[Reservation]], Awaitable[list[ReservationOutcome]]],
    ) -> list[ReservationOutcome]:
        spans = [self.tracing.span("placer reserve", one.trace, _attributes(one)) for one in wanted]
        traced = [
            one if span is None else replace(one, trace=telemetry.context_of(span))
            for one, span in zip(wanted, spans, strict=True)
        ]
        outcomes: list[ReservationOutcome] = []
        try:
            outcomes = await reserve(traced)
        finally:
            for number, span in enumerate(spans):
                if span is not None:
                    reserved = outcomes and isinstance(outcomes[number], Reserved)
                    span.set_attribute(
                        "leasehold.outcome", "reserved" if reserved else "not reserved"
                    )
                    telemetry.end([span])
        return outcomes


def _attributes(wanted: Reservation) -> dict[str, str]:
    return {
        "k8s.pod.uid": wanted.pod,
        "k8s.pod.name": wanted.name,
        "k8s.namespace.name": wanted.namespace,
        "db.system.name": "redis",
        "db.operation.name": "EVALSHA",
    }
