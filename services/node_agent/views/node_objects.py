"""Writes the custom objects that show a node's devices, if their kind is defined."""

import logging
from collections.abc import Iterable, Mapping

from services.node_agent.views.node_patches import changes_to, new_object
from shared.dialects.advertised import NodeObject
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import KubernetesError, NotFoundError
from shared.kubernetes.types import RawObject
from shared.model.clock import Clock
from shared.model.errors import UnavailableError
from shared.model.names import NodeName

logger = logging.getLogger(__name__)

RETRY_S = 60.0
"""A kind that is not defined, or that we may not write, is retried after this time."""


class NodeObjects:
    """The custom objects of one node; the node owns them, so they are deleted with it."""

    def __init__(
        self,
        client: KubernetesClient,
        node: NodeName,
        clock: Clock,
        *,
        retry_s: float = RETRY_S,
    ) -> None:
        self.client = client
        self.node = node
        self.clock = clock
        self.retry_s = retry_s
        self._retry_at: dict[str, float] = {}

    async def write(self, objects: Iterable[NodeObject], node_uid: str) -> None:
        """Create missing objects and patch stale ones, of each kind that is defined.

        Labels and annotations of others stay. Raises UnavailableError if the API server does not
        respond; a refusal is logged, and retried after `retry_s`.
        """
        for wanted in objects:
            if self.clock.ticks() < self._retry_at.get(wanted.collection, 0.0):
                continue
            try:
                await self._write(wanted, node_uid)
            except UnavailableError:
                raise
            except NotFoundError:
                self._retry_later(wanted)
                logger.debug("%s is not defined here", wanted.collection)
            except KubernetesError as error:
                self._retry_later(wanted)
                logger.warning("%s %s was not written: %s", wanted.kind, self.node, error)

    def _retry_later(self, wanted: NodeObject) -> None:
        self._retry_at[wanted.collection] = self.clock.ticks() + self.retry_s

    async def _write(self, wanted: NodeObject, node_uid: str) -> None:
        path = f"{wanted.collection}/{self.node}"
        now = self.clock.now()
        try:
            stored = await self.client.read(path, RawObject)
        except NotFoundError:
            await self.client.create(
                wanted.collection, new_object(wanted, self.node, node_uid, now_s=now)
            )
            return
        spec = stored.spec if isinstance(stored.spec, Mapping) else {}
        devices = spec.get("devices") or []
        changes = changes_to(wanted, stored.metadata.labels, devices, now_s=now)
        if changes:
            await self.client.patch_merge(path, changes)
