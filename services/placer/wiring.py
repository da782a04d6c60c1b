"""Builds the placer from real clients and serves it."""

import random

from services.placer.metrics import export_mirror
from services.placer.service import Placer
from services.placer.settings import PlacerSettings
from shared.ledger.connection_pool import LedgerClock
from shared.ledger.leases import RedisLeases
from shared.runtime.run import Nats, open_bus, serve
from shared.runtime.shared_process import SharedProcess
from shared.runtime.telemetry import open_tracing


async def serve_placer(settings: PlacerSettings, process: SharedProcess | None = None) -> None:
    clock = LedgerClock()
    tracing = open_tracing("placer", settings)
    async with (
        RedisLeases.connect(
            settings.redis_url,
            credentials=settings.redis_client_credentials,
            detects_lost_writes=True,
            clock=clock,
        ) as ledger,
        open_bus(settings, "placer", process=process) as bus,
    ):
        rng = random.Random().random  # noqa: S311 - spreads placers, no secret depends on it
        placer = Placer(
            ledger, clock, rng, settings.reservation_ttl, tracing if tracing.tracer else None
        )
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
