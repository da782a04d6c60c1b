"""Builds the timekeeper from real clients and serves it."""

import logging
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import partial

from services.timekeeper.config.budget_sources import (
    BudgetFile,
    BudgetObjects,
    ConfiguredBudgets,
    ConfiguredObjects,
)
from services.timekeeper.cost_recorder import CostRecorder
from services.timekeeper.report.status_publisher import StatusPublisher
from services.timekeeper.rest_api import BudgetApi
from services.timekeeper.service import Timekeeper
from services.timekeeper.settings import TimekeeperSettings
from shared.credentials.authorization import (
    AnonymousAuthenticator,
    Authenticator,
    KubernetesAuthenticator,
    load_tokens,
)
from shared.credentials.certificate_rotation import ServingCertificate
from shared.credentials.certificate_stores import DirectoryStore, SecretStore
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kinds import gpu_quotas
from shared.kubernetes.kinds.custom_kinds import LatestSpecs
from shared.kubernetes.kinds.gpu_prices import PriceFile
from shared.kubernetes.kubeconfig import load_credentials
from shared.kubernetes.paths import objects_path
from shared.kubernetes.reachability import ApiServerReachability
from shared.ledger.budgets import Budgets
from shared.ledger.leases import RedisLeases
from shared.model.clock import SystemClock
from shared.nats.usage_requests import request_usage
from shared.runtime import health
from shared.runtime.run import open_bus, serve


class AuthorityConfigMap:
    """The installation creates it empty."""

    def __init__(self, client: KubernetesClient, namespace: str, name: str) -> None:
        self.client = client
        self.path = objects_path(namespace, "configmaps", name)
        self._written = b""

    async def trust(self, authorities: bytes) -> None:
        """Raises RequestError if there is no such ConfigMap."""
        if authorities != self._written:
            await self.client.patch_merge(self.path, {"data": {"ca.crt": authorities.decode()}})
            self._written = authorities


def serving_certificate(
    settings: TimekeeperSettings, client: KubernetesClient | None
) -> ServingCertificate | None:
    """Return None if `--api` does not use TLS."""
    names = settings.names
    now = partial(datetime.now, UTC)
    if settings.secret and client is not None:
        namespace, _, name = settings.secret.partition("/")
        store = SecretStore(client, namespace, name)
        if not settings.authority:
            return ServingCertificate(store, None, names, now)
        authority = AuthorityConfigMap(client, namespace, settings.authority)
        return ServingCertificate(store, authority.trust, names, now)
    if settings.tls_dir:
        return ServingCertificate(DirectoryStore(settings.tls_dir), None, names, now)
    return None


logger = logging.getLogger(__name__)


async def serve_timekeeper(settings: TimekeeperSettings) -> None:
    settings.check()
    prices = PriceFile(settings.prices)
    file = BudgetFile(settings.budgets, prices) if settings.budgets else None
    if file is not None:
        file.load()
    async with (
        AsyncExitStack() as stack,
        open_bus(settings, "timekeeper") as bus,
        RedisLeases.connect(
            settings.redis_url, credentials=settings.redis_client_credentials
        ) as ledger,
    ):
        store = ledger.part(Budgets)
        probes = {"redis": store.unready_reason}
        client = _kubernetes_client(settings)
        if client is not None:
            await stack.enter_async_context(client)
            observed = ApiServerReachability.observed(client)
            probes["api"] = (await stack.enter_async_context(observed)).unready_reason
        objects = BudgetObjects(client, prices) if client and settings.objects else None
        specs = LatestSpecs(gpu_quotas.parse_spec)
        quotas = ConfiguredObjects(objects.client, gpu_quotas.OBJECTS, specs) if objects else None
        configuration = ConfiguredBudgets(file=file, objects=objects, prices=prices)
        certificate = serving_certificate(settings, client)
        timekeeper = Timekeeper(
            store=store,
            ledger=ledger,
            configuration=configuration,
            statuses=StatusPublisher(objects, quotas),
            clock=SystemClock(),
            settings=settings,
            certificate=certificate,
            costs=CostRecorder(
                store=store,
                ledger=ledger,
                read_usage=partial(request_usage, bus),
                clock=SystemClock(),
                keep_days=settings.cost_days,
            ),
        )
        api = BudgetApi(
            timekeeper,
            _authenticator(settings, client),
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
    tls = certificate.current_context if certificate else None
    address = await stack.enter_async_context(
        health.served(api.application(), settings.api, flag="--api", tls=tls)
    )
    logger.info("/budget is served on http%s://%s", "s" if tls else "", address)
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
        return load_tokens(settings.tokens)
    if settings.auth_mode == "kube" and client is not None:
        return KubernetesAuthenticator(client, SystemClock())
    return AnonymousAuthenticator()
