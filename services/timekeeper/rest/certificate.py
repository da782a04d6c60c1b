"""The certificate of the REST interface, and the ConfigMap with its authorities."""

from datetime import UTC, datetime
from functools import partial
from urllib.parse import quote

from services.timekeeper.settings import TimekeeperSettings
from shared.credentials.certificate_rotation import ServingCertificate
from shared.credentials.certificate_stores import DirectoryStore, SecretStore
from shared.kubernetes.client import KubernetesClient


class AuthorityConfigMap:
    """A ConfigMap with the authorities under `ca.crt`; the installation creates it empty."""

    def __init__(self, client: KubernetesClient, namespace: str, name: str) -> None:
        self.client = client
        self.path = (
            f"/api/v1/namespaces/{quote(namespace, safe='')}/configmaps/{quote(name, safe='')}"
        )
        self._written = b""

    async def trust(self, authorities: bytes) -> None:
        """Write the authorities once. Raises RequestError if there is no such ConfigMap."""
        if authorities != self._written:
            await self.client.patch_merge(self.path, {"data": {"ca.crt": authorities.decode()}})
            self._written = authorities


def serving_certificate(
    settings: TimekeeperSettings, client: KubernetesClient | None
) -> ServingCertificate | None:
    """Return the certificate that `--api` serves; None: it does not use TLS."""
    names, now = settings.names, partial(datetime.now, UTC)
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
