"""The webhook's lookup in the cluster: the default priority class. No review waits for it."""

import msgspec

from shared.kubernetes.client import KubernetesClient

PRIORITY_CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"


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
