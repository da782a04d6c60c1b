"""Builds the API from real clients and serves it."""

import asyncio
import logging
from contextlib import AsyncExitStack, aclosing
from functools import partial

from services.api.history_file import HistoryFile
from services.api.http_server import HttpServer
from services.api.legacy_metrics import SchedulerMetrics
from services.api.prometheus import Prometheus
from services.api.read_api import ReadApi, SpanDirectory
from services.api.service import ApiService, ApiTiming
from services.api.settings import ApiSettings
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
from shared.nats.bus import Bus
from shared.nats.usage_requests import request_usage
from shared.runtime import health
from shared.runtime.request_settings import load_rules
from shared.runtime.run import open_bus, serve

logger = logging.getLogger(__name__)

MINUTE_S = 60.0


async def serve_api(settings: ApiSettings) -> None:
    """Serve until SIGTERM or SIGINT."""
    settings.check()
    async with AsyncExitStack() as stack:
        authenticator = await _authenticator(settings, stack)
        bus = await stack.enter_async_context(open_bus(settings, "api"))
        redis_url, credentials = settings.redis_url, settings.redis_client_credentials
        ledger = await stack.enter_async_context(
            RedisLeases.connect(redis_url, credentials=credentials)
        )
        budgets = await stack.enter_async_context(
            Budgets.connect(redis_url, credentials=credentials)
        )
        history = HistoryFile(settings.state_dir / "history.sqlite")
        await stack.enter_async_context(aclosing(history))
        service = ApiService(
            ledger,
            SystemClock(),
            read_usage=partial(request_usage, bus),
            preemptions=ledger.part(Preemptions),
            history=history,
            timing=ApiTiming(idle_after_s=settings.idle_after_minutes * MINUTE_S),
        )
        api = _read_api(settings, service, budgets, bus)
        server = HttpServer(api, authenticator)
        tls = settings.serving_files
        context = tls.context if tls else None
        address = await stack.enter_async_context(
            health.served(server.application(), settings.listen, flag="--listen", tls=context)
        )
        logger.info("serving the page on http%s://%s", "s" if tls else "", address)
        if tls:
            stack.callback(asyncio.create_task(tls.reload(SystemClock().sleep)).cancel)
        if settings.scheduler_metrics:
            metrics = health.metrics_application(SchedulerMetrics(service.projection))
            await stack.enter_async_context(
                health.served(metrics, settings.scheduler_metrics, flag="--scheduler-metrics")
            )
        await serve(
            "api",
            service,
            bus=bus,
            settings=settings,
            probes={"redis": ledger.unready_reason, "ledger": service.unready_reason},
            begin=service.begin,
        )


def _read_api(settings: ApiSettings, service: ApiService, budgets: Budgets, bus: Bus) -> ReadApi:
    return ReadApi(
        service,
        budgets,
        bus,
        rules=load_rules(settings),
        histories=Prometheus(
            settings.prometheus_url, idle_after_s=settings.idle_after_minutes * MINUTE_S
        )
        if settings.prometheus_url
        else None,
        trace_url=settings.trace_url,
        spans=SpanDirectory(settings.trace_dir) if settings.trace_dir else None,
    )


async def _authenticator(settings: ApiSettings, stack: AsyncExitStack) -> Authenticator:
    if settings.auth == "tokens":
        if settings.tokens is None:
            make_token(settings.token_file, logger.info)
        return TokenAuthenticator(load_access_tokens(settings.token_file))
    if settings.auth == "kube":
        return await _at_api_server(settings, stack)
    tokens = await _at_api_server(settings, stack) if settings.kubeconfig else None
    return AnonymousAuthenticator(tokens)


async def _at_api_server(settings: ApiSettings, stack: AsyncExitStack) -> KubernetesAuthenticator:
    client = KubernetesClient(load_credentials(settings.kubeconfig))
    return KubernetesAuthenticator(await stack.enter_async_context(client), SystemClock())
