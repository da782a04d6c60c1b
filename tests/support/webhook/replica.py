"""A webhook beside an API server that calls it over TLS, as it registered itself."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from services.webhook.pod_admission import AdmissionPolicy
from services.webhook.server import serving_reviews
from services.webhook.service import Webhook
from services.webhook.wiring import (
    QuotaReader,
    RegistrationWriter,
    default_priority_class,
    read_isolation,
)
from shared.credentials.certificate_rotation import ServingCertificate
from shared.credentials.certificate_stores import DirectoryStore
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.model.clock import SystemClock
from shared.model.errors import UnavailableError
from shared.model.events.request_reply import ClaimLeaseReply, ClaimLeaseRequest
from shared.runtime.telemetry import Tracing
from simcluster.credentials import WEBHOOK_CLIENT
from tests.support.simcluster.apiserver import ApiUnderTest, api_server

NAMES = ("127.0.0.1", "localhost")
PODS = "/api/v1/namespaces/default/pods"
NOW = datetime(2026, 11, 21, tzinfo=UTC)


@dataclass
class Time:
    now: datetime = field(default_factory=lambda: datetime.now(UTC))

    def __call__(self) -> datetime:
        return self.now


class FakeClaimBinders:
    """Binders that reply as told, or not at all."""

    def __init__(self) -> None:
        self.replies: list[ClaimLeaseReply] = []
        self.requests: list[ClaimLeaseRequest] = []

    async def lease(self, request: ClaimLeaseRequest) -> ClaimLeaseReply:
        self.requests.append(request)
        if not self.replies:
            raise UnavailableError("no reply")
        return self.replies.pop(0)


@dataclass
class Replica:
    webhook: Webhook
    certificate: ServingCertificate
    registration: RegistrationWriter
    binders: FakeClaimBinders
    url: str


@asynccontextmanager
async def replica(
    api: ApiUnderTest,
    kube: KubernetesClient,
    directory: Path,
    time: Time | None = None,
    tracing: Tracing | None = None,
    *,
    knows_callers: bool = True,
    client_name: str = "",
    **policy: Any,
) -> AsyncIterator[Replica]:
    """Run a webhook with its own certificate, and register it."""
    registration = RegistrationWriter(kube)
    certificate = ServingCertificate(
        DirectoryStore(directory),
        registration.trust,
        NAMES,
        time or Time(),
        client_ca=api.ca.with_name(WEBHOOK_CLIENT) / "ca.crt" if knows_callers else None,
    )
    binders = FakeClaimBinders()
    webhook = Webhook(
        policy=AdmissionPolicy(**policy),
        default_priority_class=partial(default_priority_class, kube),
        lease_claim=binders.lease,
        read_quotas=QuotaReader(kube).read,
        read_isolation=partial(read_isolation, kube),
        rotate_certificate=certificate.run,
        clock=SystemClock(),
        tracing=tracing or Tracing("webhook", None),
        knows_callers=knows_callers,
    )
    async with serving_reviews(
        webhook,
        "127.0.0.1:0",
        certificate.current_context,
        paths=lambda: registration.paths,
        client_name=client_name,
    ) as (_, port):
        registration.url = f"https://127.0.0.1:{port}"
        await certificate.refresh()
        yield Replica(webhook, certificate, registration, binders, registration.url)


@asynccontextmanager
async def cluster() -> AsyncIterator[tuple[ApiUnderTest, KubernetesClient, aiohttp.ClientSession]]:
    async with (
        api_server() as api,
        KubernetesClient(load_credentials(api.kubeconfig, environ={})) as kube,
        api.client() as client,
    ):
        yield api, kube, client


def pod(name: str = "pod", limits: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    main: dict[str, Any] = {"name": "main", "image": "app"}
    if limits:
        main["resources"] = {"limits": limits}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"containers": [main], **spec},
    }


VGPU = {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "3000"}


async def created(
    client: aiohttp.ClientSession, obj: dict[str, Any], namespace: str = "default"
) -> tuple[int, Any]:
    async with client.post(f"/api/v1/namespaces/{namespace}/pods", json=obj) as response:
        return response.status, await response.json()


async def create_namespace(client: aiohttp.ClientSession, name: str, **labels: str) -> None:
    labelled = {f"leasehold.dev/{key.replace('_', '-')}": text for key, text in labels.items()}
    body = {"metadata": {"name": name, "labels": labelled}}
    async with client.post("/api/v1/namespaces", json=body) as response:
        assert response.status == 201, await response.text()
