"""Runs the binder: `python -m services.binder --help`."""

from services.binder.settings import BinderSettings
from services.binder.wiring import serve_binder
from shared.runtime.run import run
from shared.runtime.settings import load_or_exit


def main() -> None:
    """Parse the settings and run."""
    settings = load_or_exit(
        BinderSettings,
        "python -m services.binder",
        about="Bind placed pods and keep the ledger in sync. Any number of replicas may run.",
        examples=(
            "python -m services.binder --kubeconfig .leasehold/accounts/binder "
            "--redis-url redis://redis:6379 --nats-url nats://nats:4222",
            "python -m services.binder --api-concurrency 16 --events-per-s 20",
        ),
    )
    run(lambda: serve_binder(settings), service="binder", log_level=settings.log_level)


if __name__ == "__main__":
    main()
