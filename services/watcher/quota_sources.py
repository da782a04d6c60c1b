"""Where quotas come from: GPUQuota objects, gpu-admission's ConfigMap, and a file.

What cannot be read is logged, and the last good one stays in force. What the cluster does not know,
or does not let us read, is looked for again now and then.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from services.watcher import quotas
from shared.dialects.tencent import gpu_quota
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import NotFoundError
from shared.kubernetes.known_objects import ObjectAdded, ObjectDeleted, ObjectUpdated
from shared.kubernetes.reflector import Reflector
from shared.kubernetes.types import ObjectMeta
from shared.model.errors import RequestError
from shared.model.names import Namespace
from shared.model.quota import Quota

logger = logging.getLogger(__name__)

OBJECTS = f"/apis/{quotas.API_VERSION}/gpuquotas"
CONFIG_MAPS = f"/api/v1/namespaces/{gpu_quota.CONFIG_MAP_NAMESPACE}/configmaps"
LOOK_S = 5.0
"""How often a kind that the API server does not know is looked for again."""


class _Item(msgspec.Struct, frozen=True):
    """A GPUQuota or a ConfigMap, as far as it is known whatever it says."""

    metadata: ObjectMeta = ObjectMeta()
    spec: Any = None
    data: dict[str, str] = {}


@dataclass(slots=True)
class QuotaReflectors:
    """All quotas: objects come before the ConfigMap, and that before the file."""

    kube: KubernetesClient
    file: Mapping[Namespace, Quota] = field(default_factory=dict)
    objects: dict[Namespace, Quota] = field(default_factory=dict)
    config: dict[Namespace, Quota] = field(default_factory=dict)

    async def batches(self) -> AsyncIterator[tuple[Quota, ...]]:
        """Yield all quotas that there are, once all is read, and whenever they change."""
        synced = [asyncio.Event(), asyncio.Event()]
        changed = asyncio.Event()
        told: tuple[Quota, ...] | None = None
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(OBJECTS, "", self._take_object, synced[0], changed))
            tasks.create_task(
                self._follow(
                    CONFIG_MAPS,
                    f"metadata.name={gpu_quota.CONFIG_MAP_NAME}",
                    self._take_config,
                    synced[1],
                    changed,
                )
            )
            for each in synced:
                await each.wait()
            while True:
                changed.clear()
                now = quotas.together((self.objects, self.config, self.file))
                if now != told:
                    told = now
                    yield now
                await changed.wait()

    async def _follow(
        self,
        path: str,
        selector: str,
        take: Callable[[_Item, bool], None],
        synced: asyncio.Event,
        changed: asyncio.Event,
    ) -> None:
        refused = ""
        while True:
            try:
                reflector = Reflector(self.kube, path, _Item, field_selector=selector)
                async with aclosing(reflector.batches()) as batches:
                    async for batch in batches:
                        for change in batch:
                            match change:
                                case ObjectAdded(item=item) | ObjectUpdated(item=item):
                                    _take(take, item, gone=False)
                                case ObjectDeleted(item=item):
                                    _take(take, item, gone=True)
                                case _:
                                    synced.set()
                        changed.set()
            except RequestError as error:
                if str(error) != refused and not isinstance(error, NotFoundError):
                    logger.warning("%s cannot be read: %s", path, error)
                refused = str(error)
                if isinstance(error, NotFoundError) and path == OBJECTS and self.objects:
                    self.objects.clear()
                    changed.set()
            synced.set()
            await asyncio.sleep(LOOK_S)

    def _take_object(self, item: _Item, gone: bool) -> None:
        name = Namespace(item.metadata.name)
        if gone:
            self.objects.pop(name, None)
        else:
            self.objects[name] = quotas.read_spec(name, item.spec)

    def _take_config(self, item: _Item, gone: bool) -> None:
        self.config = {} if gone else gpu_quota.parse_config_map(item.data)


def _take(take: Callable[[_Item, bool], None], item: _Item, *, gone: bool) -> None:
    try:
        take(item, gone)
    except RequestError as error:
        logger.error("%s; what it said before stays in force", error)  # noqa: TRY400
