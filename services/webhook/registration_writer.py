"""Writes the MutatingWebhookConfiguration: all of it for a given URL, else only its caBundle."""

import base64

import msgspec

from services.webhook.registration import NAME, PATHS, configuration
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import KubernetesConflictError, NotFoundError
from shared.model.errors import UnavailableError

CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"


class _ClientConfig(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    ca_bundle: str = ""
    url: str = ""


class _RegisteredWebhook(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    client_config: _ClientConfig = _ClientConfig()


class _RegistrationMetadata(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""


class _WebhookConfiguration(msgspec.Struct, frozen=True):
    metadata: _RegistrationMetadata = _RegistrationMetadata()
    webhooks: tuple[_RegisteredWebhook, ...] = ()


class RegistrationWriter:
    """Updates the MutatingWebhookConfiguration's CAs."""

    def __init__(self, client: KubernetesClient, *, url: str = "") -> None:
        self.client = client
        self.url = url
        """The webhook's URL without a path; empty: the operator installs the configuration."""

    async def trust(self, authorities: bytes) -> None:
        """Write the authorities (PEM) unless the configuration has them.

        Raises UnavailableError while the configuration is not installed, or another replica writes.
        """
        bundle = base64.b64encode(authorities).decode()
        wanted = {
            name: _ClientConfig(ca_bundle=bundle, url=self.url and f"{self.url}{path}")
            for name, path in PATHS.items()
        }
        fields: dict[str, dict[str, str]] = {
            name: msgspec.to_builtins(config) for name, config in wanted.items()
        }
        path = f"{CONFIGURATIONS}/{NAME}"
        try:
            found = await self.client.read(path, _WebhookConfiguration)
        except NotFoundError as error:
            if not self.url:
                raise UnavailableError(
                    f"there is no MutatingWebhookConfiguration {NAME}: apply k8s/base/webhook.yaml"
                ) from error
            made = configuration(fields.__getitem__, claims=True)
            await self.client.create(CONFIGURATIONS, made)
            return
        operations = [
            operation
            for number, webhook in enumerate(found.webhooks)
            if webhook.name in wanted and webhook.client_config != wanted[webhook.name]
            for operation in self._changes(f"/webhooks/{number}/clientConfig", fields[webhook.name])
        ]
        if operations:
            version = found.metadata.resource_version
            test = {"op": "test", "path": "/metadata/resourceVersion", "value": version}
            try:
                await self.client.patch_json(path, [test, *operations])
            except KubernetesConflictError as error:
                raise UnavailableError(f"{path} was changed in the meantime") from error

    def _changes(self, path: str, fields: dict[str, str]) -> list[dict[str, object]]:
        """Return the patch of a `clientConfig`: with a URL all of it, as it may have a Service."""
        if self.url:
            return [{"op": "add", "path": path, "value": fields}]
        return [
            {"op": "add", "path": f"{path}/{name}", "value": value}
            for name, value in fields.items()
        ]
