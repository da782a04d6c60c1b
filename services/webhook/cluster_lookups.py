"""Lookups of the webhook in the cluster: keys of ConfigMaps, and the default priority class.

Secrets are never read.
"""

from urllib.parse import quote

import msgspec

from services.webhook.reviewed_pod import CONFIG_MAP, EnvFromSource
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import NotFoundError
from shared.model.errors import RequestError

PRIORITY_CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"


class _ConfigMapKeys(msgspec.Struct, frozen=True):
    data: dict[str, str] | None = None


class _PriorityClassMetadata(msgspec.Struct, frozen=True):
    name: str = ""


class _PriorityClass(msgspec.Struct, frozen=True, rename="camel"):
    metadata: _PriorityClassMetadata = _PriorityClassMetadata()
    value: int = 0
    global_default: bool = False


class _PriorityClassList(msgspec.Struct, frozen=True):
    items: tuple[_PriorityClass, ...] = ()


class ApiServerLookups:
    """Lookups in the API server."""

    def __init__(self, client: KubernetesClient) -> None:
        self.client = client

    async def default_priority_class(self) -> str:
        """Return the class of pods that do not set one; empty: there is none.

        Of several the API server uses the one with the lowest value.
        """
        classes = await self.client.read(PRIORITY_CLASSES, _PriorityClassList)
        defaults = [each for each in classes.items if each.global_default]
        return min(defaults, key=lambda each: each.value).metadata.name if defaults else ""

    async def env_from_keys(self, namespace: str, source: EnvFromSource) -> frozenset[str] | None:
        """Return a ConfigMap's keys; None for a Secret, and for an unreadable ConfigMap."""
        if source.kind != CONFIG_MAP:
            return None
        path = f"/api/v1/namespaces/{quote(namespace, safe='')}/configmaps/"
        try:
            found = await self.client.read(path + quote(source.name, safe=""), _ConfigMapKeys)
        except NotFoundError:
            # A missing ConfigMap can be created later, with any keys; only an optional one may be
            # missing when the container starts.
            return frozenset() if source.optional else None
        except RequestError:
            return None
        return frozenset(found.data or {})
