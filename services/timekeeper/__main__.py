"""Runs the timekeeper: `python -m services.timekeeper --help`."""

from services.timekeeper.settings import TimekeeperSettings
from services.timekeeper.wiring import serve_timekeeper
from shared.runtime.run import run
from shared.runtime.settings import load_or_exit


def main() -> None:
    """Parse the settings and run."""
    settings = load_or_exit(
        TimekeeperSettings,
        "python -m services.timekeeper",
        about="Count GPU time per namespace from leases. Any number of replicas may run.",
        examples=(
            "python -m services.timekeeper --kubeconfig .leasehold/accounts/timekeeper "
            "--redis-url redis://redis:6379 --nats-url nats://nats:4222",
            "python -m services.timekeeper --no-objects --budgets budgets.yaml --api :8090",
        ),
    )
    run(lambda: serve_timekeeper(settings), service="timekeeper", log_level=settings.log_level)


if __name__ == "__main__":
    main()
