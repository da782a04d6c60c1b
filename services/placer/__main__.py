"""Runs the placer: `python -m services.placer --help`."""

from services.placer.settings import PlacerSettings
from services.placer.wiring import serve_placer
from shared.runtime.run import run_service

if __name__ == "__main__":
    run_service(
        PlacerSettings,
        serve_placer,
        service="placer",
        about="Decide where pods run and reserve their shares. Any number of replicas may run.",
        examples=(
            "python -m services.placer --redis-url redis://cache:6379/0 --nats-url nats://nats:4222",
            "LEASEHOLD_RESERVATION_TTL=60 python -m services.placer --http 0.0.0.0:9102",
        ),
    )
