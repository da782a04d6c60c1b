"""Runs the timekeeper: `python -m services.timekeeper --help`."""

from services.timekeeper.settings import TimekeeperSettings
from services.timekeeper.wiring import serve_timekeeper
from shared.runtime.run import run_service

if __name__ == "__main__":
    run_service(
        TimekeeperSettings,
        serve_timekeeper,
        service="timekeeper",
        about="Count GPU time per namespace from leases. Any number of replicas may run.",
        examples=(
            "python -m services.timekeeper --kubeconfig .leasehold/accounts/timekeeper "
            "--redis-url redis://redis:6379 --nats-url nats://nats:4222",
            "python -m services.timekeeper --no-objects --budgets budgets.yaml --api :8090",
        ),
    )
