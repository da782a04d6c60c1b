"""Runs the binder: `python -m services.binder --help`."""

from services.binder.settings import BinderSettings
from services.binder.wiring import serve_binder
from shared.runtime.run import run_service

if __name__ == "__main__":
    run_service(
        BinderSettings,
        serve_binder,
        service="binder",
        about="Bind placed pods and keep the ledger in sync. Any number of replicas may run.",
        examples=(
            "python -m services.binder --kubeconfig .leasehold/accounts/binder "
            "--redis-url redis://redis:6379 --nats-url nats://nats:4222",
            "python -m services.binder --api-concurrency 16 --events-per-s 20",
        ),
    )
