"""Removes nodes from the ledger whose deletion was missed: the API server no longer has them."""

import logging
from collections.abc import Sequence

from services.binder.metrics import PrometheusMetrics
from services.binder.pod_client import PodClient
from services.binder.report.explanations import summarize
from shared.ledger.leases import RedisLeases
from shared.model.events.pod_events import NodesListed
from shared.model.names import NodeName
from shared.model.node import NodeRevision

logger = logging.getLogger(__name__)


class DeletedNodes:
    """Compares the ledger with lists of all nodes; a read of the node itself decides."""

    def __init__(self, ledger: RedisLeases, nodes: PodClient, metrics: PrometheusMetrics) -> None:
        self.ledger = ledger
        self.nodes = nodes
        self.metrics = metrics

    async def remove(self, listings: Sequence[NodesListed]) -> None:
        """Remove the nodes that are missing from the newest list and are deleted.

        One that was saved meanwhile, of a higher revision, stays.
        """
        if await self.ledger.generation() is None:
            return
        newest = max(listings, key=lambda listing: listing.revision)
        removed: list[NodeName] = []
        for name in sorted((await self.ledger.node_names()).difference(newest.nodes)):
            if not await self.nodes.node_exists(name):
                revision = NodeRevision(newest.revision)
                if await self.ledger.remove_node(name, revision=revision):
                    removed.append(name)
        if removed:
            self.metrics.count_anomaly("deleted_nodes", len(removed))
            logger.error("nodes that were deleted without an event: %s", summarize(removed))
