"""Runs the dashboard: `python -m services.dashboard --help`."""

import logging
from contextlib import AsyncExitStack

from services.dashboard.http_server import Pages
from services.dashboard.legacy_metrics import old_metrics
from services.dashboard.service import Dashboard
from services.dashboard.settings import ABOUT, EXAMPLES, DashboardSettings
from shared.credentials.authorization import (
    AnonymousAuthenticator,
    Authenticator,
    KubernetesAuthenticator,
    TokenAuthenticator,
    make_token,
)
from shared.credentials.tokens import load_access_tokens
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.ledger.budgets import Budgets
from shared.ledger.leases import RedisLeases
from shared.model.clock import SystemClock
from shared.nats.bus import Bus
from shared.runtime import health
from shared.runtime.run import run, serve
from shared.runtime.settings import load_or_exit

logger = logging.getLogger(__name__)


async def show(settings: DashboardSettings) -> None:
    """Build the dashboard from real parts and serve it until told to stop."""
    settings.check()
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        door = await _door(settings, stack)
        bus = await stack.enter_async_context(
            Bus.connect_later(
                settings.nats_url,
                name="dashboard",
                keys=settings.nats_client_credentials("dashboard"),
                keeps_stream=True,
                copies=settings.nats_copies,
            )
        )
        redis_url, keys = settings.redis_url, settings.redis_client_credentials
        ledger = await stack.enter_async_context(RedisLeases.connect(redis_url, credentials=keys))
        store = await stack.enter_async_context(Budgets.connect(redis_url, credentials=keys))
        board = Dashboard(ledger, clock)
        pages = Pages(board, door, store, trace_url=settings.trace_url).application()
        address = await stack.enter_async_context(
            health.served(pages, settings.listen, flag="--listen")
        )
        logger.info("the page is on http://%s", address)
        if settings.scheduler_metrics:
            old = old_metrics(board.projection)
            await stack.enter_async_context(
                health.served(old, settings.scheduler_metrics, flag="--scheduler-metrics")
            )
        probes = {"redis": ledger.unready_reason, "ledger": board.missing}
        await serve(
            "dashboard", board, bus=bus, settings=settings, probes=probes, begin=board.begin
        )


async def _door(settings: DashboardSettings, stack: AsyncExitStack) -> Authenticator:
    if settings.auth == "tokens":
        if settings.tokens is None:
            make_token(settings.token_file, logger.info)
        return TokenAuthenticator(load_access_tokens(settings.token_file))
    if settings.auth == "kube":
        kube = await stack.enter_async_context(
            KubernetesClient(load_credentials(settings.kubeconfig))
        )
        return KubernetesAuthenticator(kube, SystemClock())
    return AnonymousAuthenticator()


def main() -> None:
    """Read the settings and run."""
    settings = load_or_exit(
        DashboardSettings, "python -m services.dashboard", about=ABOUT, examples=EXAMPLES
    )
    run(lambda: show(settings), service="dashboard", log_level=settings.log_level)


if __name__ == "__main__":
    main()
