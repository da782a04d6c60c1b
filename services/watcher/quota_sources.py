"""Sources of quotas: GPUQuota objects, gpu-admission's ConfigMap, and a file.

The last valid version of an invalid object stays in force. Without one its namespace gets nothing
new, since it was to be limited.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import Gauge

from shared.dialects.tencent import gpu_quota
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import NotFoundError
from shared.kubernetes.kinds.custom_kinds import LatestSpecs
from shared.kubernetes.kinds.gpu_quotas import KIND, NOTHING, OBJECTS, merge_sources, parse_spec
from shared.kubernetes.kinds.object_files import load_objects
from shared.kubernetes.reflector import UNKNOWN_KIND_RETRY_S, follow
from shared.kubernetes.types import RawObject
from shared.model.bounds import cut
from shared.model.budgets.quota import Quota
from shared.model.errors import RequestError
from shared.model.names import Namespace

logger = logging.getLogger(__name__)

CONFIG_MAPS = f"/api/v1/namespaces/{gpu_quota.CONFIG_MAP_NAMESPACE}/configmaps"
REFUSED_S = 60.0
"""How long other quotas wait for a source that refuses to be read: an API server that has just
started denies for half a minute what it permits."""
INVALID = Gauge(
    "leasehold_quota_invalid",
    "1 while the GPUQuota, or the ConfigMap gpuquota, of this name is invalid.",
    ["name"],
)


_Apply = Callable[[str, RawObject | None], None]


def load_file(path: Path) -> dict[Namespace, Quota]:
    """Load GPUQuota objects; `*` is for all namespaces without a quota of their own.

    Raises RequestError, which names the file.
    """
    return load_objects(path, KIND, parse_spec)


@dataclass(slots=True)
class QuotaReflectors:
    """Objects come before the ConfigMap, and that before the file."""

    client: KubernetesClient
    file: Mapping[Namespace, Quota] = field(default_factory=dict)
    objects: LatestSpecs[Quota] = field(default_factory=lambda: LatestSpecs(parse_spec))
    config_map: dict[Namespace, Quota] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def batches(self) -> AsyncIterator[tuple[Quota, ...]]:
        synced = [asyncio.Event(), asyncio.Event()]
        published: tuple[Quota, ...] | None = None
        config_map = f"metadata.name={gpu_quota.CONFIG_MAP_NAME}"
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch(OBJECTS, "", self._apply_object, synced[0]))
            tasks.create_task(
                self._watch(CONFIG_MAPS, config_map, self._apply_config_map, synced[1])
            )
            for listed in synced:
                await listed.wait()
            while True:
                self._changed.clear()
                invalid = self.objects.problems.keys() - self.objects.valid.keys()
                nothing = {name: Quota(namespace=name, limits=NOTHING) for name in invalid}
                now = merge_sources((self.objects.valid, nothing, self.config_map, self.file))
                if now != published:
                    published = now
                    yield now
                await self._changed.wait()

    async def _watch(self, path: str, selector: str, apply: _Apply, synced: asyncio.Event) -> None:
        logged = ""
        clock = asyncio.get_running_loop().time
        refused_until = clock() + REFUSED_S
        following = follow(
            self.client, path, RawObject, retry_s=UNKNOWN_KIND_RETRY_S, field_selector=selector
        )
        async with aclosing(following) as batches:
            async for batch in batches:
                refusal = batch.refusal
                if isinstance(refusal, NotFoundError):
                    if path == OBJECTS:
                        self.objects = LatestSpecs(parse_spec)
                elif refusal is not None and str(refusal) != logged:
                    logger.warning("%s cannot be read: %s", path, refusal)
                    logged = str(refusal)
                for named, item in batch.changed:
                    _apply_valid(apply, named.name, item)
                has_none = isinstance(refusal, NotFoundError)
                if batch.listed or has_none or (refusal is not None and clock() >= refused_until):
                    synced.set()
                self._changed.set()

    def _apply_object(self, name: str, item: RawObject | None) -> None:
        if item is None:
            self.objects.remove(Namespace(name))
        elif problem := self.objects.apply(item):
            raise RequestError(problem)

    def _apply_config_map(self, _: str, item: RawObject | None) -> None:
        self.config_map = gpu_quota.parse_config_map(item.data or {}) if item else {}


def _apply_valid(apply: _Apply, name: str, item: RawObject | None) -> None:
    try:
        apply(name, item)
        if item is None:
            INVALID.remove_by_labels({"name": name})
        else:
            INVALID.labels(name).set(0)
    except RequestError as error:
        INVALID.labels(name).set(1)
        logger.error(  # noqa: TRY400
            "%s; the last valid version stays in force, and without one no new pod is allowed",
            cut(str(error)),
        )
