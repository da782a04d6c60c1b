"""Limits of running containers: the product's updater, with containers that are only numbers."""

from typing import TYPE_CHECKING, Any

from services.node_agent.records.checkpoint_entry import CheckpointEntry
from services.node_agent.resize.limit_updates import LimitUpdater
from shared.dialects.hami_core import MEMORY_LIMIT
from shared.model.errors import RequestError

if TYPE_CHECKING:
    from tests.model.node import Agent, Node


class ModelLimits(LimitUpdater):
    """Limits that are written hold at once, and each container says what it uses."""

    def __init__(self, node: "Node", agent: "Agent") -> None:
        monitor: Any = None
        super().__init__(
            node.name,
            lease_sync=agent.lease_sync,
            checkpoint=agent.checkpoint,
            get_snapshot=node.snapshot,
            monitor=monitor,
            on_change=lambda: None,
            clock=node.clock,
        )
        self.kubelet = node.kubelet

    async def restore_altered(self) -> None:
        """Write all limits anew, as a scan of usage does where they differ."""
        for entry in self.checkpoint.entries:
            await self._write(entry)

    async def _write(self, entry: CheckpointEntry) -> None:
        record = self.kubelet.records.get(entry.allocation.pod)
        if record is not None and record.given is not None:
            record.given = dict(entry.limits.environment)

    async def _check(self, entry: CheckpointEntry) -> None:
        record = self.kubelet.records.get(entry.allocation.pod)
        limit = entry.limits.environment[f"{MEMORY_LIMIT}_0"]
        if record is not None and record.used_mib > int(limit.removesuffix("m")):
            raise RequestError(f"{record.used_mib} MiB are in use, and the limit would be {limit}")
