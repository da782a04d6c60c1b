"""Builds the webhook from real clients and serves it."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

import msgspec

from services.webhook.registration import (
    NAME,
    Manifest,
    configuration,
    registered_url,
    webhook_paths,
)
from services.webhook.server import Drain, serving_reviews
from services.webhook.service import CERTIFICATE_EXPIRATION, Webhook
from services.webhook.settings import WebhookSettings
from shared.credentials.certificate_rotation import ServingCertificate
from shared.credentials.certificate_stores import DirectoryStore, SecretStore
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import KubernetesConflictError, NotFoundError
from shared.kubernetes.kinds.custom_kinds import LatestSpecs
from shared.kubernetes.kinds.gpu_quotas import KIND, OBJECTS, parse_spec
from shared.kubernetes.kinds.object_files import load_objects
from shared.kubernetes.kubeconfig import load_credentials
from shared.kubernetes.types import (
    ApiObject,
    ClientConfig,
    ObjectList,
    PriorityClass,
    RawObject,
    WebhookConfiguration,
)
from shared.model.budgets.quota import Quota
from shared.model.clock import SystemClock
from shared.model.errors import UnavailableError
from shared.model.events.request_reply import ClaimLeaseReply, ClaimLeaseRequest
from shared.model.names import ISOLATION, Namespace
from shared.nats.bus import Bus
from shared.runtime.run import Nats, open_bus, serve
from shared.runtime.telemetry import open_tracing

CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"


class RegistrationWriter:
    def __init__(self, client: KubernetesClient, *, url: str = "") -> None:
        self.client = client
        self.url = url
        """Without a path; empty: the operator installs the configuration."""
        self.paths: frozenset[str] = frozenset()
        self._is_current = False
        """An earlier version may have written the configuration that is there."""

    async def trust(self, authorities: bytes) -> None:
        """Write the authorities (PEM) unless the configuration has them.

        Raises UnavailableError while it is not installed, or another replica writes.
        """
        wanted = {
            name: ClientConfig(ca_bundle=authorities, url=self.url and f"{self.url}{path}")
            for name, path in webhook_paths().items()
        }
        path = f"{CONFIGURATIONS}/{NAME}"
        try:
            configuration_in_cluster = await self.client.read(path, WebhookConfiguration)
        except NotFoundError as error:
            if not self.url:
                raise UnavailableError(
                    f"there is no MutatingWebhookConfiguration {NAME}: apply k8s/base/webhook.yaml"
                ) from error
            await self.client.create(CONFIGURATIONS, _with_clients(wanted))
            self.paths = frozenset(webhook_paths().values())
            return
        registered = (
            {hook.name for hook in configuration_in_cluster.webhooks} if not self.url else wanted
        )
        self.paths = frozenset(path for name, path in webhook_paths().items() if name in registered)
        changed = [
            number
            for number, hook in enumerate(configuration_in_cluster.webhooks)
            if hook.client_config != wanted.get(hook.name, hook.client_config)
        ]
        operations: list[dict[str, object]] = [
            {"op": "add", "path": f"/webhooks/{number}/clientConfig/caBundle", "value": authorities}
            for number in changed
        ]
        if self.url and (changed or not self._is_current):
            hooks = _with_clients(wanted)["webhooks"]
            operations = [{"op": "add", "path": "/webhooks", "value": hooks}]
        if operations:
            version = configuration_in_cluster.metadata.resource_version
            test = {"op": "test", "path": "/metadata/resourceVersion", "value": version}
            try:
                await self.client.patch_json(path, [test, *operations])
            except KubernetesConflictError as error:
                raise UnavailableError(f"{path} was changed in the meantime") from error
        self._is_current = True


def _with_clients(clients: Mapping[str, ClientConfig]) -> Manifest:
    return configuration({name: msgspec.to_builtins(client) for name, client in clients.items()})


NAMESPACES = "/api/v1/namespaces"
PRIORITY_CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"
LEASE_TIMEOUT_S = 2.5
"""Shorter than the timeout of the webhook for allocations."""


async def default_priority_class(client: KubernetesClient) -> str:
    """Of several classes the API server uses the one with the lowest value."""
    classes = await client.read(PRIORITY_CLASSES, ObjectList[PriorityClass])
    defaults = [
        priority_class for priority_class in classes.items or () if priority_class.global_default
    ]
    return (
        min(defaults, key=lambda priority_class: priority_class.value).metadata.name
        if defaults
        else ""
    )


@dataclass(slots=True)
class QuotaReader:
    """The last valid version of a GPUQuota counts, as for watchers."""

    client: KubernetesClient
    file: Mapping[Namespace, Quota] = field(default_factory=dict)
    objects: LatestSpecs[Quota] = field(default_factory=lambda: LatestSpecs(parse_spec))

    async def read(self) -> Mapping[Namespace, Quota]:
        """Without a valid version, a namespace has no times, and not those of all others."""
        items: Sequence[RawObject] = ()
        with contextlib.suppress(NotFoundError):
            items = (await self.client.read(OBJECTS, ObjectList[RawObject])).items or ()
        for name in self.objects.items.keys() - {item.metadata.name for item in items}:
            self.objects.remove(name)
        for item in items:
            self.objects.apply(item)
        invalid = {name: Quota(namespace=name) for name in self.objects.problems}
        return {**self.file, **invalid, **self.objects.valid}


async def read_isolation(client: KubernetesClient) -> Mapping[Namespace, str]:
    namespaces = await client.read(NAMESPACES, ObjectList[ApiObject])
    return {
        Namespace(namespace.metadata.name): namespace.metadata.annotations[ISOLATION]
        for namespace in namespaces.items or ()
        if ISOLATION in namespace.metadata.annotations
    }


async def lease_claim(bus: Bus, request: ClaimLeaseRequest) -> ClaimLeaseReply:
    """Raises UnavailableError if no binder replies in time."""
    if not bus.connected:
        raise UnavailableError("NATS is not connected")
    return await bus.request(request, ClaimLeaseReply, timeout_s=LEASE_TIMEOUT_S)


async def serve_webhook(settings: WebhookSettings) -> None:
    """Without NATS, decide by its last reports."""
    policy = settings.policy
    tls_dir = settings.tls_dir
    quotas = load_objects(settings.quotas, KIND, parse_spec) if settings.quotas else {}
    async with (
        KubernetesClient(load_credentials(settings.kubeconfig)) as client,
        open_bus(settings, "webhook") as bus,
    ):
        store = DirectoryStore(tls_dir) if tls_dir else SecretStore(client, *settings.secret_name)
        registration = RegistrationWriter(client)
        certificate = ServingCertificate(
            store,
            registration.trust,
            settings.names,
            lambda: datetime.now(UTC),
            client_ca=settings.client_ca_file,
        )
        tracing = open_tracing("webhook", settings)
        CERTIFICATE_EXPIRATION.set_function(lambda: certificate.expires_at)
        webhook = Webhook(
            policy=policy,
            default_priority_class=partial(default_priority_class, client),
            lease_claim=partial(lease_claim, bus),
            read_quotas=QuotaReader(client, quotas).read,
            read_isolation=partial(read_isolation, client),
            rotate_certificate=certificate.run,
            clock=SystemClock(),
            tracing=tracing,
            knows_callers=settings.client_ca_file is not None,
        )
        drain = Drain(settings.drain_s)
        async with serving_reviews(
            webhook,
            settings.listen,
            certificate.current_context,
            paths=lambda: registration.paths,
            drain=drain,
            client_name=settings.client_name,
        ) as (_, port):
            if settings.url:
                registration.url = registered_url(settings.url, port)
            await serve(
                "webhook",
                webhook,
                bus=bus,
                settings=settings,
                nats=Nats.OPTIONAL,
                tracing=tracing,
                probes={"certificate": certificate.unready_reason},
                drain=drain.start,
            )
