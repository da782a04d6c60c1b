"""The inventory of the ledger: nodes and devices as the API server and agents report them."""

import logging
from collections.abc import Mapping, Sequence

from shared.ledger.connection import in_batches
from shared.ledger.ledger_feed import LedgerFeed
from shared.ledger.ledger_totals import read_nodes
from shared.ledger.rows.node_rows import encode_device_report, encode_node_facts
from shared.model.events.node_events import DeviceReported
from shared.model.names import DeviceUuid, NodeName
from shared.model.node import UNKNOWN_REVISION, NodeFacts, NodeRevision

logger = logging.getLogger(__name__)

NODES_AT_ONCE = 32
"""Nodes saved per call: Redis runs nothing else meanwhile."""


class LedgerInventory(LedgerFeed):
    """Writes nodes and devices, and reads them."""

    async def save_nodes(
        self, nodes: Sequence[NodeFacts], revisions: Sequence[NodeRevision] = ()
    ) -> bool:
        """Save nodes' facts from the API server; also possible during a rebuild.

        Facts of a lower revision than what was saved or removed in the last two minutes are
        ignored. Without `revisions` they are not compared. Returns whether anything changed.
        """
        known = revisions or [UNKNOWN_REVISION] * len(nodes)
        rows = [
            (*encode_node_facts(facts), revision.node, revision.pods)
            for facts, revision in zip(nodes, known, strict=True)
        ]
        has_changed = False
        for batch in in_batches(rows, NODES_AT_ONCE):
            changed, too_large = await self._connection.run("save_nodes", *batch, state="open")
            has_changed = has_changed or changed
            for name in too_large:
                logger.error("node %s is not saved: it has too many resources", name)
        return has_changed

    async def save_devices(
        self, reports: Sequence[DeviceReported]
    ) -> dict[DeviceUuid, tuple[NodeName, NodeName]] | None:
        """Save what nodes' agents report; also possible during a rebuild.

        A report up to two minutes older than one saved in the last 20 s is ignored. Leases stay: a
        device that is missing, unhealthy or smaller than its use takes nothing new. Its fence is
        raised to those that its agent has honoured, unless that is too high to count on from. One
        that another node reports, too, stays there. Returns None if nothing changed, otherwise such
        devices, with the node that reports them and the one that has them.
        """
        shared: dict[DeviceUuid, tuple[NodeName, NodeName]] | None = None
        for batch in in_batches(
            [encode_device_report(report) for report in reports], NODES_AT_ONCE
        ):
            found = await self._connection.run("save_devices", *batch, state="open")
            if found is not False:
                pairs = zip(found[1::3], found[2::3], strict=True)
                shared = (shared or {}) | dict(zip(found[::3], pairs, strict=True))
        return shared

    async def reported_by_agent(self, node: NodeName) -> bool:
        """Return whether our agent sent the node's latest device report."""
        return bool(await self._connection.run("query", "by_agent", node))

    async def remove_node(
        self, name: NodeName, *, revision: NodeRevision = UNKNOWN_REVISION
    ) -> bool:
        """Remove a node, on the same condition; its leases stay until they are released."""
        row = (name, revision.node, revision.pods)
        return bool(await self._connection.run("remove_node", *row, state="open"))

    async def node_names(self) -> frozenset[NodeName]:
        """Return the names of all nodes, those included of which only leases are left."""
        return frozenset(map(NodeName, (await read_nodes(self._connection, [])).names))

    async def set_cordoned(self, reasons: Mapping[NodeName, str]) -> dict[NodeName, str]:
        """Cordon nodes, so that no pod is bound to them, or (empty) uncordon them.

        Returns all that are cordoned, with why. Their leases stay, and so does what they report;
        mirrors see them without served resources.
        """
        parts = [part for item in reasons.items() for part in item]
        found = await self._connection.run("cordon", parts)
        return {NodeName(name): why for name, why in zip(found[::2], found[1::2], strict=True)}
