"""Builds the API from real clients and serves it."""

import asyncio
import logging
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime
from functools import partial

from services.api.aggregated.front_proxy import FrontProxy, Registration, read_front_proxy
from services.api.aggregated.objects import GROUP
from services.api.aggregated.server import AggregatedApi
from services.api.http.http_server import HttpServer
from services.api.http.pod_objects import PodObjects
from services.api.http.read_api import ReadApi
from services.api.reports.legacy_metrics import SchedulerMetrics
from services.api.reports.prometheus import Prometheus
from services.api.service import ApiService, ApiTiming
from services.api.settings import ApiSettings
from shared.credentials.authorization import (
    AnonymousAuthenticator,
    Authenticator,
    KubernetesAuthenticator,
    load_tokens,
    make_token,
)
from shared.credentials.certificate_rotation import ServingCertificate
from shared.credentials.certificate_stores import DirectoryStore, SecretStore
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kinds.gpu_prices import PriceFile
from shared.kubernetes.kubeconfig import load_credentials
from shared.ledger.budgets import Budgets
from shared.ledger.connection_pool import LedgerClock
from shared.ledger.leases import RedisLeases
from shared.ledger.preemptions import Preemptions
from shared.model.clock import SystemClock, in_background
from shared.model.errors import LeaseholdError, UnavailableError
from shared.model.names import SYSTEM_NAMESPACE
from shared.model.quantity import MINUTE_S
from shared.nats.bus import Bus
from shared.nats.usage_requests import request_usage
from shared.runtime import health
from shared.runtime.request_settings import load_rules
from shared.runtime.run import open_bus, serve

logger = logging.getLogger(__name__)

RETRY_S = 5.0
"""Pause before a listener of the aggregated API starts again after an error."""
FRONT_PROXY_S = 30.0
"""Interval of readings of how the API server presents itself."""


async def serve_api(settings: ApiSettings) -> None:
    settings.check()
    async with AsyncExitStack() as stack:
        kube = await _api_server(settings, stack)
        authenticator = _authenticator(settings, kube)
        bus = await stack.enter_async_context(open_bus(settings, "api"))
        ledger_clock = LedgerClock()
        ledger = await stack.enter_async_context(
            RedisLeases.connect(
                settings.redis_url,
                credentials=settings.redis_client_credentials,
                clock=ledger_clock,
            )
        )
        service = ApiService(
            ledger,
            SystemClock(),
            read_usage=partial(request_usage, bus),
            preemptions=ledger.part(Preemptions),
            ledger_clock=ledger_clock,
            read_version=kube.date if kube else None,
            timing=ApiTiming(idle_after_s=settings.idle_after_minutes * MINUTE_S),
        )
        api = _read_api(settings, service, ledger.part(Budgets), bus, PodObjects(kube))
        server = HttpServer(api, authenticator)
        tls = settings.serving_files
        context = tls.current_context if tls else None
        address = await stack.enter_async_context(
            health.served(server.application(), settings.listen, flag="--listen", tls=context)
        )
        logger.info("serving the page on http%s://%s", "s" if tls else "", address)
        if tls:
            await stack.enter_async_context(in_background(tls.reload(SystemClock().sleep)))
        if settings.aggregated and kube is not None:
            group = AggregatedApi(server, KubernetesAuthenticator(kube, SystemClock()))
            serving = serve_group(group, kube, settings)
            await stack.enter_async_context(in_background(serving))
            with suppress(TimeoutError):
                await asyncio.wait_for(group.served.wait(), RETRY_S)
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


def _read_api(
    settings: ApiSettings, service: ApiService, budgets: Budgets, bus: Bus, pods: PodObjects
) -> ReadApi:
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
        prices=PriceFile(settings.prices),
        spans=settings.trace_dir,
        pods=pods,
    )


async def _api_server(settings: ApiSettings, stack: AsyncExitStack) -> KubernetesClient | None:
    reviews_tokens = settings.auth == "none" and settings.kubeconfig is not None
    if settings.auth != "kube" and not settings.aggregated and not reviews_tokens:
        return None
    client = KubernetesClient(load_credentials(settings.kubeconfig))
    return await stack.enter_async_context(client)


def _authenticator(settings: ApiSettings, kube: KubernetesClient | None) -> Authenticator:
    if settings.auth == "tokens":
        if settings.tokens is None:
            make_token(settings.token_file, logger.info)
        return load_tokens(settings.token_file)
    reviews = KubernetesAuthenticator(kube, SystemClock()) if kube else None
    return reviews if reviews and settings.auth == "kube" else AnonymousAuthenticator(reviews)


async def serve_group(group: AggregatedApi, kube: KubernetesClient, settings: ApiSettings) -> None:
    namespace, _, name = settings.aggregated_secret.partition("/")
    directory = DirectoryStore(settings.state_dir / "aggregated")
    store = SecretStore(kube, namespace, name) if name else directory
    names = [f"api.{namespace or SYSTEM_NAMESPACE}.svc"]
    trust = Registration(kube).trust
    now = partial(datetime.now, UTC)
    reported = ""
    while True:
        try:
            group.proxy = await read_front_proxy(kube)
            certificate = ServingCertificate(store, trust, names, now)
            group.proxy.require(certificate)
            await certificate.refresh()
            async with (
                health.served(
                    group.application(),
                    settings.aggregated,
                    flag="--aggregated",
                    tls=certificate.current_context,
                ),
                asyncio.TaskGroup() as tasks,
            ):
                group.served.set()
                remembering = tasks.create_task(group.remember())
                renewal = tasks.create_task(certificate.run(asyncio.sleep))
                await _until_changed(group.proxy, kube)
                renewal.cancel()
                remembering.cancel()
        except* LeaseholdError as errors:
            if str(errors.exceptions) != reported:
                reported = str(errors.exceptions)
                logger.warning(
                    "%s is not served: %s", GROUP, "; ".join(map(str, errors.exceptions))
                )
            await asyncio.sleep(RETRY_S)


async def _until_changed(proxy: FrontProxy, kube: KubernetesClient) -> None:
    """The API server may be away meanwhile."""
    while True:
        await asyncio.sleep(FRONT_PROXY_S)
        with suppress(UnavailableError):
            if await read_front_proxy(kube) != proxy:
                return
