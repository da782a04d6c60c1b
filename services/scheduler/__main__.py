"""Runs watcher, placer, planner and binder together: `python -m services.scheduler --help`."""

from services.scheduler.settings import KINDS
from services.scheduler.wiring import serve_scheduler
from shared.runtime.run import run
from shared.runtime.settings import exit_if_invalid, load_each

PROGRAM = "python -m services.scheduler"


def main() -> None:
    with exit_if_invalid(PROGRAM):
        common, watcher, placer, planner, binder = load_each(
            KINDS,
            PROGRAM,
            about=(
                "Run watcher, placer, planner and binder in one process, which takes less CPU and "
                "time per pod: work between them is not sent over NATS. Any number of replicas "
                "may run."
            ),
            examples=(
                "python -m services.scheduler --kubeconfig .leasehold/accounts/binder "
                "--redis-url redis://redis:6379 --nats-url nats://nats:4222",
                "python -m services.scheduler --services placer,binder "
                "--nats-credentials .leasehold/credentials/nats",
            ),
        )
        services = common.checked()
    run(
        lambda: serve_scheduler(
            services, common, watcher=watcher, placer=placer, planner=planner, binder=binder
        ),
        service="scheduler",
        log_level=common.log_level,
    )


if __name__ == "__main__":
    main()
