"""Writing a lost checkpoint anew, from what the kubelet shows and what the ledger has told."""

import logging
from collections.abc import Mapping

from services.node_agent.allocate.allocation import Node
from services.node_agent.allocate.pod_resolver import Finding
from services.node_agent.ports import MigLayouts, Records
from services.node_agent.records.checkpoint_rebuild import rebuilt
from shared.model.lease import Lease
from shared.model.names import PodUid

logger = logging.getLogger(__name__)


async def rebuild_record(
    record: Records,
    facts: Node,
    leases: Mapping[PodUid, Lease],
    *,
    finding: Finding,
    instances: MigLayouts,
    now: float,
) -> None:
    """Write the lost checkpoint anew from PodResources and leases; a new node's is empty."""
    entries = rebuilt(
        facts,
        leases,
        await finding.pods.list_pods(),
        await finding.held.list_held(),
        instances=await instances.listed(),
        now=now,
    )
    lost = [entry for entry in entries if entry.allocation.pod not in record.pods]
    for entry in lost:
        await record.save(entry)
    record.lost = False
    if lost:
        logger.warning("the checkpoint was rebuilt with %d entries", len(lost))
