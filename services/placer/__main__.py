"""Runs the placer: `python -m services.placer --help`."""

import random
from dataclasses import dataclass

from services.placer.metrics import PrometheusTally, watch_mirror
from services.placer.service import Placer
from services.placer.tracing import TracedLedger
from shared.ledger.leases import RedisLeases
from shared.model.clock import SystemClock
from shared.nats.bus import Bus
from shared.runtime.run import Nats, run, serve
from shared.runtime.settings import LedgerSettings, load_or_exit, setting
from shared.runtime.telemetry import open_tracing


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacerSettings(LedgerSettings):
    """What the placer is told."""

    reservation_ttl: float = setting(30.0, "seconds until a reservation that nobody binds ends")


async def place(settings: PlacerSettings) -> None:
    """Build the placer from real parts and serve it until told to stop."""
    async with (
        RedisLeases.connect(
            settings.redis_url,
            credentials=settings.redis_client_credentials,
            detects_lost_writes=True,
        ) as ledger,
        Bus.connect_later(
            settings.nats_url,
            name="placer",
            keys=settings.nats_client_credentials("placer"),
            keeps_stream=True,
            copies=settings.nats_copies,
        ) as bus,
    ):
        draw = random.Random().random  # noqa: S311 - spreads placers, guards nothing
        tracing = open_tracing("placer", settings)
        placer = Placer(
            TracedLedger(ledger, tracing) if tracing.tracer else ledger,
            SystemClock(),
            PrometheusTally(),
            draw,
            ttl_s=settings.reservation_ttl,
        )
        watch_mirror(placer.mirror)
        probes = {"redis": ledger.unready_reason, "ledger": placer.missing}
        await serve(
            "placer",
            placer,
            bus=bus,
            settings=settings,
            nats=Nats.MEANWHILE,
            tracing=tracing,
            probes=probes,
        )


def main() -> None:
    """Read the settings and run."""
    settings = load_or_exit(
        PlacerSettings,
        "python -m services.placer",
        about="Decide where pods run and reserve their shares. Any number of replicas may run.",
        examples=(
            "python -m services.placer --redis-url redis://cache:6379/0 --nats-url nats://nats:4222",
            "LEASEHOLD_RESERVATION_TTL=60 python -m services.placer --http 0.0.0.0:9102",
        ),
    )
    run(lambda: place(settings), service="placer", log_level=settings.log_level)


if __name__ == "__main__":
    main()
