"""Runs the planner: `python -m services.planner --help`."""

import os

from services.planner.settings import PlannerSettings
from services.planner.wiring import serve_planner
from shared.runtime.run import run_service

NICENESS = 10
"""Plans take seconds of a core: where cores are shared, the processes that bind pods come first."""


async def serve(settings: PlannerSettings) -> None:
    os.nice(NICENESS)
    await serve_planner(settings)


if __name__ == "__main__":
    run_service(
        PlannerSettings,
        serve,
        service="planner",
        about=(
            "Plan preemptions and starts of pods that wait; binders carry the plans out. Any "
            "number of replicas may run: one leads."
        ),
        examples=(
            "python -m services.planner --kubeconfig .leasehold/accounts/planner "
            "--redis-url redis://redis:6379 --nats-url nats://nats:4222",
            "LEASEHOLD_PREEMPTION=false python -m services.planner --plan-starts-after-s 300",
        ),
    )
