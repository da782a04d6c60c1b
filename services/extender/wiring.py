"""Builds the extender from real clients and serves it."""

import logging

from services.extender.pod_requests import PodRequests
from services.extender.server import application
from services.extender.service import Extender
from services.extender.settings import ExtenderSettings
from shared.credentials.serving_files import ServingFiles
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import NotFoundError
from shared.kubernetes.kubeconfig import load_credentials
from shared.kubernetes.paths import pod_path
from shared.kubernetes.types import ApiPod
from shared.ledger.leases import RedisLeases
from shared.model.clock import SystemClock, in_background
from shared.model.events.request_reply import PodBindingReply, PodBindingRequest
from shared.runtime import health
from shared.runtime.run import Nats, open_bus, serve
from shared.runtime.telemetry import open_tracing

logger = logging.getLogger(__name__)

BIND_TIMEOUT_S = 4.0
"""Shorter than kube-scheduler's `httpTimeout` of 5 s, longer than a binder's deadline."""


async def serve_extender(settings: ExtenderSettings) -> None:
    tls = ServingFiles(*settings.tls_files)
    clock = SystemClock()
    parser = settings.pod_parser()
    async with (
        KubernetesClient(load_credentials(settings.kubeconfig)) as client,
        RedisLeases.connect(
            settings.redis_url, credentials=settings.redis_client_credentials
        ) as ledger,
        open_bus(settings, "extender") as bus,
    ):

        async def get_pod(namespace: str, name: str) -> ApiPod | None:
            try:
                return await client.read(pod_path(namespace, name), ApiPod)
            except NotFoundError:
                return None

        async def bind_pod(request: PodBindingRequest) -> PodBindingReply:
            return await bus.request(request, PodBindingReply, timeout_s=BIND_TIMEOUT_S)

        tracing = open_tracing("extender", settings)
        extender = Extender(
            ledger=ledger,
            pods=PodRequests(parser, get_pod),
            bind_pod=bind_pod,
            clock=clock,
            tracing=tracing,
        )
        pages = application(extender, settings.client_name)
        async with (
            health.served(
                pages, settings.listen, flag="--listen", tls=tls.current_context
            ) as address,
            in_background(tls.reload(clock.sleep)),
        ):
            logger.info("serving kube-scheduler on https://%s", address)
            await serve(
                "extender",
                extender,
                bus=bus,
                settings=settings,
                nats=Nats.MEANWHILE,
                tracing=tracing,
                probes={"redis": ledger.unready_reason, "ledger": extender.unready_reason},
            )
