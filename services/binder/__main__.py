"""Runs the binder, and the leases of claims beside it: `python -m services.binder --help`."""

from functools import partial

from services.binder.settings import BinderSettings
from services.binder.wiring import serve_binder
from services.claims.wiring import claims_beside
from shared.runtime.run import run_service

if __name__ == "__main__":
    run_service(
        BinderSettings,
        partial(serve_binder, beside=claims_beside),
        service="binder",
        about="Bind placed pods and keep the ledger in sync. Any number of replicas may run.",
        examples=(
            "python -m services.binder --kubeconfig .leasehold/accounts/binder "
            "--redis-url redis://redis:6379 --nats-url nats://nats:4222",
            "python -m services.binder --api-concurrency 16 --events-per-s 20",
        ),
    )
