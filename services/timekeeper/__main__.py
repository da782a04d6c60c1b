"""Runs the timekeeper: `python -m services.timekeeper --help`."""

import logging
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import partial

from services.timekeeper.config.configuration import read_factors
from services.timekeeper.config.sources import BudgetFile, BudgetObjects, Configured
from services.timekeeper.report.status_publisher import Told
from services.timekeeper.rest.client_trust import AuthorityMap, NoMap
from services.timekeeper.rest.server import Pages
from services.timekeeper.service import Timekeeper
from services.timekeeper.settings import TimekeeperSettings
from shared.credentials.authorization import (
    AnonymousAuthenticator,
    Authenticator,
    KubernetesAuthenticator,
    TokenAuthenticator,
)
from shared.credentials.certificate_rotation import ServingCertificate
from shared.credentials.certificate_stores import DirectoryStore, SecretStore
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


async def keep_time(settings: TimekeeperSettings) -> None:
    """Build the timekeeper from real parts and serve it until told to stop."""
    settings.check()
    factors = read_factors(settings.model_factors)
    file = BudgetFile(settings.budgets) if settings.budgets else None
    if file is not None:
        file.load()
    async with AsyncExitStack() as stack:
        kube = None
        if settings.objects or settings.secret or settings.manner == "kube":
            kube = await stack.enter_async_context(
                KubernetesClient(load_credentials(settings.kubeconfig))
            )
        bus = await stack.enter_async_context(
            Bus.connect_later(
                settings.nats_url,
                name="timekeeper",
                keys=settings.nats_client_credentials("timekeeper"),
                keeps_stream=True,
                copies=settings.nats_copies,
            )
        )
        redis_url, keys = settings.redis_url, settings.redis_client_credentials
        ledger = await stack.enter_async_context(RedisLeases.connect(redis_url, credentials=keys))
        store = await stack.enter_async_context(Budgets.connect(redis_url, credentials=keys))
        objects = BudgetObjects(kube) if kube and settings.objects else None
        configured = Configured(file=file, objects=objects)
        shown = _shown(settings, kube)
        keeper = Timekeeper(
            store=store,
            ledger=ledger,
            configuration=configured,
            bus=bus,
            telling=Told(objects),
            clock=SystemClock(),
            factors=factors,
            tick_s=settings.tick_s,
            charge_every_s=settings.charge_every_s,
            keep_days=settings.keep_days,
            certificate=shown,
        )
        pages = Pages(
            keeper,
            store,
            configured,
            _door(settings, kube),
            kube=kube,
            old_reports=settings.old_reports,
        )
        tls = shown.context if shown else None
        address = await stack.enter_async_context(
            health.served(pages.application(), settings.api, flag="--api", tls=tls)
        )
        logger.info("/budget and /v1 are served on http%s://%s", "s" if tls else "", address)
        if settings.reports:
            await stack.enter_async_context(
                health.served(pages.reports(), settings.reports, flag="--reports")
            )
        probes = {"redis": store.unready_reason} | (
            {"certificate": shown.unready_reason} if shown else {}
        )
        await serve("timekeeper", keeper, bus=bus, settings=settings, probes=probes)


def _door(settings: TimekeeperSettings, kube: KubernetesClient | None) -> Authenticator:
    if settings.tokens is not None:
        return TokenAuthenticator(load_access_tokens(settings.tokens))
    if settings.manner == "kube" and kube is not None:
        return KubernetesAuthenticator(kube, SystemClock())
    return AnonymousAuthenticator()


def _shown(
    settings: TimekeeperSettings, kube: KubernetesClient | None
) -> ServingCertificate | None:
    """Return the certificate that `--api` shows; None: it speaks no TLS."""
    names, now = settings.names, partial(datetime.now, UTC)
    if settings.secret and kube is not None:
        namespace, _, name = settings.secret.partition("/")
        trust = AuthorityMap(kube, namespace, settings.authority) if settings.authority else NoMap()
        return ServingCertificate(SecretStore(kube, namespace, name), trust, names, now)
    if settings.tls_dir:
        return ServingCertificate(DirectoryStore(settings.tls_dir), NoMap(), names, now)
    return None


def main() -> None:
    """Read the settings and run."""
    settings = load_or_exit(
        TimekeeperSettings,
        "python -m services.timekeeper",
        about="Count GPU time per namespace from leases. Any number of replicas may run.",
        examples=(
            "python -m services.timekeeper --kubeconfig .leasehold/kubeconfig "
            "--redis-url redis://redis:6379 --nats-url nats://nats:4222",
            "python -m services.timekeeper --no-objects --budgets budgets.yaml --api :8090",
        ),
    )
    run(lambda: keep_time(settings), service="timekeeper", log_level=settings.log_level)


if __name__ == "__main__":
    main()
