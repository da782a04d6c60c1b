"""Builds the timekeeper from real clients and serves it."""

import logging
from contextlib import AsyncExitStack

from services.timekeeper.config.budget_sources import BudgetFile, BudgetObjects, ConfiguredBudgets
from services.timekeeper.config.budget_spec import parse_factors
from services.timekeeper.metrics import TimekeeperMetrics
from services.timekeeper.report.status_publisher import StatusPublisher
from services.timekeeper.rest.api import BudgetApi
from services.timekeeper.rest.certificate import serving_certificate
from services.timekeeper.service import Timekeeper
from services.timekeeper.settings import TimekeeperSettings
from shared.credentials.authorization import (
    AnonymousAuthenticator,
    Authenticator,
    KubernetesAuthenticator,
    TokenAuthenticator,
)
from shared.credentials.certificate_rotation import ServingCertificate
from shared.credentials.tokens import load_access_tokens
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.kubernetes.reachability import ApiServerReachability
from shared.ledger.budgets import Budgets
from shared.ledger.leases import RedisLeases
from shared.model.clock import SystemClock
from shared.nats.bus import Bus
from shared.runtime import health
from shared.runtime.run import serve

logger = logging.getLogger(__name__)


async def serve_timekeeper(settings: TimekeeperSettings) -> None:
    """Serve the timekeeper and its REST interface until SIGTERM or SIGINT."""
    settings.check()
    factors = parse_factors(settings.model_factors)
    file = BudgetFile(settings.budgets) if settings.budgets else None
    if file is not None:
        file.load()
    redis_url, credentials = settings.redis_url, settings.redis_client_credentials
    async with (
        AsyncExitStack() as stack,
        Bus.connect_later(
            settings.nats_url,
            name="timekeeper",
            credentials=settings.nats_client_credentials("timekeeper"),
        ) as bus,
        RedisLeases.connect(redis_url, credentials=credentials) as ledger,
        Budgets.connect(redis_url, credentials=credentials) as store,
    ):
        probes = {"redis": store.unready_reason}
        client = _kubernetes_client(settings)
        if client is not None:
            await stack.enter_async_context(client)
            observed = ApiServerReachability.observed(client)
            probes["api"] = (await stack.enter_async_context(observed)).unready_reason
        objects = BudgetObjects(client) if client and settings.objects else None
        configuration = ConfiguredBudgets(file=file, objects=objects)
        certificate = serving_certificate(settings, client)
        metrics = TimekeeperMetrics()
        timekeeper = Timekeeper(
            store=store,
            ledger=ledger,
            configuration=configuration,
            bus=bus,
            statuses=StatusPublisher(objects),
            metrics=metrics,
            clock=SystemClock(),
            factors=factors,
            tick_s=settings.tick_s,
            charge_every_s=settings.charge_every_s,
            keep_days=settings.keep_days,
            rotate_certificate=certificate.run if certificate else None,
        )
        api = BudgetApi(
            timekeeper,
            store,
            configuration,
            _authenticator(settings, client),
            metrics=metrics,
            client=client,
            old_reports=settings.old_reports,
        )
        await _serve_api(stack, settings, api, certificate)
        if certificate:
            probes["certificate"] = certificate.unready_reason
        await serve("timekeeper", timekeeper, bus=bus, settings=settings, probes=probes)


async def _serve_api(
    stack: AsyncExitStack,
    settings: TimekeeperSettings,
    api: BudgetApi,
    certificate: ServingCertificate | None,
) -> None:
    """Serve the REST interface until the stack is closed."""
    tls = certificate.context if certificate else None
    address = await stack.enter_async_context(
        health.served(api.application(), settings.api, flag="--api", tls=tls)
    )
    logger.info("/budget and /v1 are served on http%s://%s", "s" if tls else "", address)
    if settings.reports:
        await stack.enter_async_context(
            health.served(api.reports(), settings.reports, flag="--reports")
        )


def _kubernetes_client(settings: TimekeeperSettings) -> KubernetesClient | None:
    if settings.objects or settings.secret or settings.auth_mode == "kube":
        return KubernetesClient(load_credentials(settings.kubeconfig))
    return None


def _authenticator(settings: TimekeeperSettings, client: KubernetesClient | None) -> Authenticator:
    if settings.tokens is not None:
        return TokenAuthenticator(load_access_tokens(settings.tokens))
    if settings.auth_mode == "kube" and client is not None:
        return KubernetesAuthenticator(client, SystemClock())
    return AnonymousAuthenticator()
