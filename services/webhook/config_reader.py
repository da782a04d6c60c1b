"""Reads which variables config maps would set, and which priority class is the usual one.

Secrets are never read.
"""

from urllib.parse import quote

import msgspec

from services.webhook.pods import Source
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import NotFoundError
from shared.model.errors import RequestError


class _ConfigMap(msgspec.Struct):
    data: dict[str, str] | None = None


CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"


class _Named(msgspec.Struct, frozen=True):
    name: str = ""


class _Class(msgspec.Struct, frozen=True, rename="camel"):
    metadata: _Named = _Named()
    value: int = 0
    global_default: bool = False


class _Classes(msgspec.Struct, frozen=True):
    items: tuple[_Class, ...] = ()


class ClusterClasses:
    """Priority classes, from the API server."""

    def __init__(self, kube: KubernetesClient) -> None:
        self.kube = kube

    async def usual(self) -> str:
        """Return the class of pods that name none, empty if there is none.

        Of several the API server takes the one of the least value.
        """
        found = await self.kube.read(CLASSES, _Classes)
        usual = [one for one in found.items if one.global_default]
        return min(usual, key=lambda one: one.value).metadata.name if usual else ""


class ClusterKeys:
    """Keys of config maps, from the API server."""

    def __init__(self, kube: KubernetesClient) -> None:
        self.kube = kube

    async def keys(self, namespace: str, source: Source) -> frozenset[str] | None:
        """Return a config map's keys, none if it does not exist (yet); None for a secret."""
        if source.kind != "config map":
            return None
        path = f"/api/v1/namespaces/{quote(namespace, safe='')}/configmaps/"
        try:
            found = await self.kube.read(path + quote(source.name, safe=""), _ConfigMap)
        except NotFoundError:
            # What is not there yet can be made later, with any key: only an optional one may miss.
            return frozenset() if source.optional else None
        except RequestError:
            return None
        return frozenset(found.data or {})
