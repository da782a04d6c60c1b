"""Runs the planner: `python -m services.planner --help`."""

from services.planner.settings import PlannerSettings
from services.planner.wiring import serve_planner
from shared.runtime.run import run_service

if __name__ == "__main__":
    run_service(
        PlannerSettings,
        serve_planner,
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
