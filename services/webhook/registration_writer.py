"""Writes the webhook's registration: whole where it is ours to make, else only what it trusts."""

import base64
from typing import Any

import msgspec

from services.webhook.registration import NAME, configuration
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import KubernetesConflictError, NotFoundError
from shared.model.errors import UnavailableError

CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"


class _Client(msgspec.Struct):
    bundle: str = msgspec.field(name="caBundle", default="")
    url: str = ""


class _Webhook(msgspec.Struct):
    client: _Client = msgspec.field(name="clientConfig", default_factory=_Client)


class _Metadata(msgspec.Struct):
    version: str = msgspec.field(name="resourceVersion", default="")


class _Configuration(msgspec.Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    webhooks: list[_Webhook] = []


class Registration:
    """The MutatingWebhookConfiguration."""

    def __init__(self, kube: KubernetesClient, *, url: str = "") -> None:
        self.kube = kube
        self.url = url
        """Where the webhook is reached; empty: the configuration is installed by the operator."""

    async def trust(self, authorities: bytes) -> None:
        """Write the authorities if they are not those that are trusted.

        Raises UnavailableError while the configuration is not installed, or another replica writes.
        """
        text = base64.b64encode(authorities).decode()
        path = f"{CONFIGURATIONS}/{NAME}"
        try:
            found = await self.kube.read(path, _Configuration)
        except NotFoundError as error:
            if not self.url:
                raise UnavailableError(
                    f"there is no MutatingWebhookConfiguration {NAME}: apply k8s/base/webhook.yaml"
                ) from error
            await self.kube.create(CONFIGURATIONS, self._made(text))
            return
        wanted = _Client(bundle=text, url=self.url)
        operations: list[dict[str, Any]] = [
            {"op": "add", "path": f"/webhooks/{number}/clientConfig/{key}", "value": value}
            for number, webhook in enumerate(found.webhooks)
            for key, value in self._client(text).items()
            if webhook.client != wanted
        ]
        if operations:
            test = {"op": "test", "path": "/metadata/resourceVersion"}
            try:
                await self.kube.patch_json(
                    path, [{**test, "value": found.metadata.version}, *operations]
                )
            except KubernetesConflictError as error:
                raise UnavailableError("the registration was changed meanwhile") from error

    def _client(self, bundle: str) -> dict[str, str]:
        return {"caBundle": bundle} | ({"url": self.url} if self.url else {})

    def _made(self, bundle: str) -> dict[str, Any]:
        return configuration(self._client(bundle))
