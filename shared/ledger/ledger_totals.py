"""Totals of the ledger: nodes with their leases, gangs, fair shares and quotas."""

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import NamedTuple

import msgspec

from shared.ledger.connection import LedgerConnection, LedgerPart, in_batches, unpack
from shared.ledger.records import FairShareRecord, NodeRowRecord, NodesRecord
from shared.ledger.rows.joined_texts import unescaped
from shared.ledger.rows.node_rows import decode_node_rows
from shared.ledger.rows.quota_rows import decode_quota_totals, quota_row
from shared.model.budgets.fair_share import Entitlement, FairShare, GpuAmount
from shared.model.budgets.quota import Quota, QuotaTotals
from shared.model.leases.ledger import NodeTotals, UnreadableRecord
from shared.model.names import NodeName, PodUid

PAGE_SIZE = 100


class NodePage(NamedTuple):
    generation: str
    feed_entry: str
    capacity: int
    version: int
    names: list[str]
    rows: Sequence[NodeRowRecord]
    unreadable: Sequence[UnreadableRecord]
    leases: Iterator[bytes]


async def read_nodes(
    connection: LedgerConnection,
    names: Sequence[str],
    *,
    with_leases: bool = False,
    state: str = "ready",
) -> NodePage:
    """Read nodes, or, without names, only which nodes there are."""
    packed, *values = await connection.run_raw("read_nodes", names, with_leases, state=state)
    record = msgspec.convert(unpack(packed), NodesRecord)
    connection.observe_version(record.version)
    return NodePage(
        record.generation,
        record.feed_entry,
        record.capacity,
        record.version,
        names=[name for name in record.names if is_text(name)],
        rows=record.nodes,
        unreadable=record.unreadable,
        leases=iter(values),
    )


def is_text(name: object) -> bool:
    """Other programs may have written bytes as names."""
    return isinstance(name, str) and not any(
        "\ud800" <= character <= "\udfff" for character in name
    )


class LedgerTotals(LedgerPart):
    async def pages(self) -> AsyncIterator[list[NodeTotals]]:
        """Each node is read together with its leases."""
        names = (await read_nodes(self._connection, [])).names
        for batch in in_batches(sorted(names), PAGE_SIZE):
            yield await self._page(batch)

    async def of_nodes(self, names: Sequence[NodeName]) -> list[NodeTotals]:
        all_totals: list[NodeTotals] = []
        for batch in in_batches(names, PAGE_SIZE):
            all_totals += await self._page(batch)
        return all_totals

    async def _page(self, names: Sequence[str]) -> list[NodeTotals]:
        return (await self.read(names))[0]

    async def read(self, names: Sequence[str]) -> tuple[list[NodeTotals], list[UnreadableRecord]]:
        """Return also the records that cannot be read."""
        page = await read_nodes(self._connection, names, with_leases=True)
        decoded = list(decode_node_rows(page.rows, page.leases))
        names_read = {totals.node.facts.name for totals in decoded}
        missing = [row.name for row in page.rows if row.name not in names_read]
        broken = [UnreadableRecord("nodes", name, name) for name in missing]
        return decoded, [*page.unreadable, *broken]

    async def claimed(self) -> dict[NodeName, dict[str, int]]:
        claimed: dict[NodeName, dict[str, int]] = {}
        for node, escaped_name, amount in await self._connection.run("query", "claimed"):
            amounts = claimed.setdefault(NodeName(node), {})
            name = unescaped(escaped_name)
            amounts[name] = amounts.get(name, 0) + int(amount)
        return claimed

    async def gangs(self) -> dict[str, frozenset[PodUid]]:
        return await self._gangs("gangs")

    async def waiting_gangs(self) -> dict[str, frozenset[PodUid]]:
        return await self._gangs("waiting_gangs")

    async def _gangs(self, query: str) -> dict[str, frozenset[PodUid]]:
        counted: dict[str, set[PodUid]] = {}
        for gang, pod in await self._connection.run("query", query):
            counted.setdefault(unescaped(gang), set()).add(PodUid(pod))
        return {gang: frozenset(pods) for gang, pods in counted.items()}

    async def fair_share(self) -> FairShare:
        reply = await self._connection.run("query", "fair_share")
        record = msgspec.convert(reply, FairShareRecord)
        return FairShare(
            total=GpuAmount(cores_percent=record.cores, memory_mib=record.memory_mib),
            used={
                used.namespace: GpuAmount(cores_percent=used.cores, memory_mib=used.memory_mib)
                for used in sorted(record.used, key=lambda used: used.namespace)
            },
            entitlements={
                row.namespace: Entitlement(
                    weight=row.entitlement.weight, has_budget=not row.entitlement.is_spent
                )
                for row in record.entitlements
            },
        )


class LedgerQuotas(LedgerPart):
    async def save(self, quotas: Sequence[Quota], *, read_at: float) -> bool:
        """Return whether any quota changed; those read earlier than the stored are ignored.

        Existing leases are charged anew, in one step; none ends.
        """
        rows = [msgspec.to_builtins(quota_row(quota)) for quota in quotas]
        return bool(await self._connection.run("quotas", "save", rows, read_at, state="any"))

    async def totals(self, *, charges: bool = True) -> QuotaTotals:
        return decode_quota_totals(*await self._connection.run_raw("read_quotas", "read", charges))
