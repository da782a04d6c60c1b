"""Builds the placer from real clients and serves it."""

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from services.placer.metrics import export_mirror
from services.placer.service import Placer
from services.placer.settings import PlacerSettings
from shared.ledger.leases import RedisLeases
from shared.ledger.ledger_clock import LedgerClock
from shared.model.ledger import Reservation, ReservationOutcome, Reserved
from shared.model.request import Gang
from shared.nats.bus import Bus
from shared.runtime import telemetry
from shared.runtime.run import Nats, serve
from shared.runtime.shared_process import SharedProcess
from shared.runtime.telemetry import open_tracing


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


async def serve_placer(settings: PlacerSettings, process: SharedProcess | None = None) -> None:
    """Serve the placer until SIGTERM or SIGINT."""
    clock = LedgerClock()
    tracing = open_tracing("placer", settings)
    kind = TracedLedger if tracing.tracer else RedisLeases
    async with (
        kind.connect(
            settings.redis_url,
            credentials=settings.redis_client_credentials,
            detects_lost_writes=True,
            clock=clock,
        ) as ledger,
        Bus.connect_later(
            settings.nats_url,
            name="placer",
            credentials=settings.nats_client_credentials("placer"),
            handlers=process.handlers if process else None,
        ) as bus,
    ):
        rng = random.Random().random  # noqa: S311 - spreads placers, no secret depends on it
        if isinstance(ledger, TracedLedger):
            ledger.tracing = tracing
        placer = Placer(ledger, clock, rng, settings.reservation_ttl)
        export_mirror(placer.mirror)
        probes = {"redis": ledger.unready_reason, "ledger": placer.unready_reason}
        await serve(
            "placer",
            placer,
            bus=bus,
            settings=settings,
            nats=Nats.MEANWHILE,
            tracing=tracing,
            probes=probes,
            process=process,
        )
