"""What the leading binder checks: the server's policy, records, and the totals of leases."""

from collections.abc import Sequence

from shared.ledger.connection import LedgerPart, in_batches
from shared.ledger.ledger_totals import LedgerQuotas, LedgerTotals, is_text, read_nodes
from shared.ledger.total_checks import LedgerReading
from shared.model.errors import UnavailableError
from shared.model.leases.ledger import UnreadableRecord

NODES_PER_CALL = 25
"""With their leases, in 3 to 4 ms of the server: pods wait that long."""
RECORDS_PER_CALL = 500
LISTED = (
    "waiting",
    "claims",
    "starts",
    "repelling",
    "entitlements",
    "expiring",
    "node-sizes",
    "unsynced",
    "quotas",
    "quota-charges",
    "quota-used",
    "preemption:budgets",
    "preemption:preemptions",
)
"""Read for this alone; other records are read with their nodes."""


class RecordChecks(LedgerPart):
    async def check_policy(self) -> None:
        """Raise UnavailableError if the server may evict keys."""
        await self._connection.run("eviction_policy", state="check")

    async def read(self) -> LedgerReading:
        """Raises UnavailableError while the ledger is not ready, or if it was rebuilt meanwhile."""
        totals = LedgerTotals(self._connection)
        quotas = LedgerQuotas(self._connection)
        start = await read_nodes(self._connection, [])
        nodes = []
        unreadable = [record for kind in LISTED for record in await self._unreadable(kind)]
        for names in in_batches(sorted(start.names), NODES_PER_CALL):
            readable_totals, broken = await totals.read(names)
            nodes += readable_totals
            unreadable += broken
        charged = await quotas.totals()
        claimed = await totals.claimed()
        fair_share = await totals.fair_share()
        end = await read_nodes(self._connection, [])
        if end.generation != start.generation:
            raise UnavailableError("the ledger was rebuilt while it was read; read it again")
        return LedgerReading(
            generation=start.generation,
            is_of_one_moment=end.version == start.version,
            nodes=tuple(nodes),
            quotas=charged,
            preemption_claims=claimed,
            fair_share=fair_share,
            unreadable=tuple(unreadable),
        )

    async def _unreadable(self, kind: str) -> list[UnreadableRecord]:
        cursor = "0"
        unreadable = set[UnreadableRecord]()
        while True:
            cursor, names = await self._connection.run(
                "list_unreadable", kind, cursor, RECORDS_PER_CALL
            )
            unreadable.update(UnreadableRecord(kind, name) for name in names if is_text(name))
            if cursor == "0":
                return sorted(unreadable)

    async def close(self, generation: str, unreadable: Sequence[UnreadableRecord]) -> bool:
        """Close the ledger, so that a binder rebuilds it; return False if it is another one by now.

        Records that cannot be read are remembered for 24 hours.
        """
        names = [f"{record.kind} {record.key}" for record in unreadable]
        return bool(await self._connection.run("rebuild", "close", generation, names, state="any"))

    async def unreadable(self) -> list[UnreadableRecord]:
        names = await self._connection.run("query", "unreadable")
        return [UnreadableRecord(*name.split(" ", 1)) for name in sorted(names)]
