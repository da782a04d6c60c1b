"""Writing a lost checkpoint anew, from what the kubelet shows and what the ledger has told."""

import logging
from collections.abc import Mapping

from services.node_agent.allocate.allocation import NodeSnapshot
from services.node_agent.allocate.pod_resolver import PodResolver
from services.node_agent.ports import MigLayouts, Records
from services.node_agent.records.checkpoint_rebuild import rebuild_entries
from shared.model.lease import Lease
from shared.model.names import PodUid

logger = logging.getLogger(__name__)


async def rebuild_record(
    record: Records,
    facts: NodeSnapshot,
    leases: Mapping[PodUid, Lease],
    *,
    finding: PodResolver,
    instances: MigLayouts,
    now: float,
) -> None:
    """Write the lost checkpoint anew from PodResources and leases; a new node's is empty."""
    entries = rebuild_entries(
        facts,
        leases,
        await finding.pods.list_pods(),
        await finding.pod_resources.list_holdings(),
        instances=await instances.list_instances(),
        now=now,
    )
    lost = [entry for entry in entries if entry.allocation.pod not in record.pods]
    for entry in lost:
        await record.save(entry)
    record.lost = False
    if lost:
        logger.warning("the checkpoint was rebuilt with %d entries", len(lost))
