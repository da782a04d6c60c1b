"""Where clients of the REST interface find what they are to trust."""

from urllib.parse import quote

from shared.kubernetes.client import KubernetesClient


class AuthorityMap:
    """A ConfigMap with the authorities under `ca.crt`; it is there, if empty, since the install."""

    def __init__(self, kube: KubernetesClient, namespace: str, name: str) -> None:
        self.kube = kube
        self.path = (
            f"/api/v1/namespaces/{quote(namespace, safe='')}/configmaps/{quote(name, safe='')}"
        )
        self._written = b""

    async def trust(self, authorities: bytes) -> None:
        """Write the authorities, once. Raises RequestError if there is no such ConfigMap."""
        if authorities != self._written:
            await self.kube.patch_merge(self.path, {"data": {"ca.crt": authorities.decode()}})
            self._written = authorities


class NoMap:
    """The authority lies beside the certificate."""

    async def trust(self, authorities: bytes) -> None:
        """Leave it there."""
