"""The ledger as the placer asks it, with a span for each pod's reservation."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from services.placer.service import Ledger, PlacerWaitingPods
from shared.model.ledger import (
    LedgerChange,
    Reservation,
    ReservationOutcome,
    Reserved,
    Snapshot,
)
from shared.model.request import Gang
from shared.runtime import telemetry


@dataclass(slots=True)
class TracedLedger:
    """Passes everything on; what a lease leads to becomes a child of its reservation."""

    ledger: Ledger
    tracing: telemetry.Tracing

    async def reserve(
        self, wanted: Sequence[Reservation], *, now: float, ttl_s: float
    ) -> list[ReservationOutcome]:
        """Reserve a group inside the spans `placer reserve`."""
        return await self._inside(
            wanted, lambda inside: self.ledger.reserve(inside, now=now, ttl_s=ttl_s)
        )

    async def reserve_gang(
        self, gang: Gang, wanted: Sequence[Reservation], *, now: float, ttl_s: float
    ) -> list[ReservationOutcome]:
        """Reserve a gang inside the same spans, one for each pod."""
        return await self._inside(
            wanted, lambda inside: self.ledger.reserve_gang(gang, inside, now=now, ttl_s=ttl_s)
        )

    async def _inside(
        self,
        wanted: Sequence[Reservation],
        reserve: Callable[[Sequence[Reservation]], Awaitable[list[ReservationOutcome]]],
    ) -> list[ReservationOutcome]:
        spans = [self.tracing.span("placer reserve", one.trace, _facts(one)) for one in wanted]
        inside = [
            one if span is None else replace(one, trace=telemetry.context_of(span))
            for one, span in zip(wanted, spans, strict=True)
        ]
        outcomes: list[ReservationOutcome] = []
        try:
            outcomes = await reserve(inside)
        finally:
            for number, span in enumerate(spans):
                if span is not None:
                    reserved = outcomes and isinstance(outcomes[number], Reserved)
                    span.set_attribute(
                        "leasehold.outcome", "reserved" if reserved else "not reserved"
                    )
                    telemetry.end([span])
        return outcomes

    @property
    def waiting_pods(self) -> PlacerWaitingPods:
        """The pods that fit nowhere yet."""
        return self.ledger.waiting_pods

    async def snapshot(self) -> Snapshot:
        """Return all nodes."""
        return await self.ledger.snapshot()

    def changes(self, position: str) -> AsyncIterator[list[LedgerChange]]:
        """Yield what changes after the position."""
        return self.ledger.changes(position)


def _facts(wanted: Reservation) -> dict[str, str]:
    return {
        "k8s.pod.uid": wanted.pod,
        "k8s.pod.name": wanted.name,
        "k8s.namespace.name": wanted.namespace,
        "db.system.name": "redis",
        "db.operation.name": "EVALSHA",
    }
