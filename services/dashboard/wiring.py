"""Builds the dashboard from real clients and serves it."""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack

from services.dashboard.http_server import DashboardServer
from services.dashboard.legacy_metrics import legacy_metrics_application
from services.dashboard.read_api import ReadApi, SpanDirectory
from services.dashboard.service import Dashboard, DashboardTiming, UsageOfNodes
from services.dashboard.settings import DashboardSettings
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
from shared.ledger.preemptions import Preemptions
from shared.model.clock import SystemClock
from shared.model.lease import ShareMeasurement
from shared.model.names import NodeName
from shared.nats.bus import Bus
from shared.nats.usage_requests import request_usage
from shared.runtime import health
from shared.runtime.run import serve

logger = logging.getLogger(__name__)

MINUTE_S = 60.0


async def serve_dashboard(settings: DashboardSettings) -> None:
    """Serve until SIGTERM or SIGINT."""
    settings.check()
    async with AsyncExitStack() as stack:
        authenticator = await _authenticator(settings, stack)
        bus = await stack.enter_async_context(
            Bus.connect_later(
                settings.nats_url,
                name="dashboard",
                credentials=settings.nats_client_credentials("dashboard"),
            )
        )
        redis_url, credentials = settings.redis_url, settings.redis_client_credentials
        ledger = await stack.enter_async_context(
            RedisLeases.connect(redis_url, credentials=credentials)
        )
        budgets = await stack.enter_async_context(
            Budgets.connect(redis_url, credentials=credentials)
        )
        timing = DashboardTiming(idle_after_s=settings.idle_after_minutes * MINUTE_S)
        dashboard = Dashboard(
            ledger,
            SystemClock(),
            read_usage=_usage_reader(bus),
            preemptions=ledger.part(Preemptions),
            timing=timing,
        )
        api = ReadApi(
            dashboard,
            budgets,
            bus,
            trace_url=settings.trace_url,
            spans=SpanDirectory(settings.trace_dir) if settings.trace_dir else None,
        )
        server = DashboardServer(api, authenticator)
        tls = settings.serving_files
        context = tls.context if tls else None
        address = await stack.enter_async_context(
            health.served(server.application(), settings.listen, flag="--listen", tls=context)
        )
        logger.info("serving the page on http%s://%s", "s" if tls else "", address)
        if tls:
            stack.callback(asyncio.create_task(tls.reload(SystemClock().sleep)).cancel)
        if settings.scheduler_metrics:
            legacy_metrics = legacy_metrics_application(dashboard.projection)
            await stack.enter_async_context(
                health.served(
                    legacy_metrics, settings.scheduler_metrics, flag="--scheduler-metrics"
                )
            )
        await serve(
            "dashboard",
            dashboard,
            bus=bus,
            settings=settings,
            probes={"redis": ledger.unready_reason, "ledger": dashboard.unready_reason},
            begin=dashboard.begin,
        )


def _usage_reader(bus: Bus) -> UsageOfNodes:
    async def read(
        nodes: Iterable[NodeName],
    ) -> Mapping[NodeName, Iterable[ShareMeasurement] | None]:
        replies = await request_usage(bus, nodes)
        return {node: reply.shares if reply else None for node, reply in replies.items()}

    return read


async def _authenticator(settings: DashboardSettings, stack: AsyncExitStack) -> Authenticator:
    if settings.auth == "tokens":
        if settings.tokens is None:
            make_token(settings.token_file, logger.info)
        return TokenAuthenticator(load_access_tokens(settings.token_file))
    if settings.auth == "kube":
        return await _at_api_server(settings, stack)
    tokens = await _at_api_server(settings, stack) if settings.kubeconfig else None
    return AnonymousAuthenticator(tokens)


async def _at_api_server(
    settings: DashboardSettings, stack: AsyncExitStack
) -> KubernetesAuthenticator:
    client = KubernetesClient(load_credentials(settings.kubeconfig))
    return KubernetesAuthenticator(await stack.enter_async_context(client), SystemClock())
