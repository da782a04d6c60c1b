"""The sums of the ledger, and what it counts beside leases: nodes, gangs, quotas."""

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from shared.ledger.connection import LedgerStore, in_groups, unpacked
from shared.ledger.rows.node_rows import account_of
from shared.ledger.rows.quota_rows import accounts_of, quota_row
from shared.model.fair_share import Entitlement, FairShare, GpuAmount
from shared.model.ledger import NodeTotals
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.quota import Quota, QuotaTotals

PAGE = 100
"""Nodes per page of a survey."""


class Accounts(LedgerStore):
    """The part of the ledger (`RedisLeases`) that answers for its sums."""

    async def totals(self) -> AsyncIterator[list[NodeTotals]]:
        """Yield every node's totals with the leases they are the sum of, read at one moment."""
        (_, _, _, names, _), _ = await self._survey([])
        for page in in_groups(sorted(names), PAGE):
            (_, _, _, _, rows), leases = await self._survey(page, with_leases=True)
            yield [account_of(row, leases) for row in rows]

    async def accounts(self, names: Sequence[NodeName]) -> list[NodeTotals]:
        """Return what `totals` yields of some nodes; one that nobody knows is left out."""
        found: list[NodeTotals] = []
        for page in in_groups(names, PAGE):
            (_, _, _, _, rows), leases = await self._survey(page, with_leases=True)
            found += [account_of(row, leases) for row in rows]
        return found

    async def kept(self) -> dict[NodeName, dict[str, int]]:
        """Return what claims keep of nodes' ordinary resources, beside what leases take."""
        kept: dict[NodeName, dict[str, int]] = {}
        for node, name, amount in await self._connection.run("query", "claimed"):
            amounts = kept.setdefault(NodeName(node), {})
            amounts[name] = amounts.get(name, 0) + int(amount)
        return kept

    async def gangs(self) -> dict[str, frozenset[PodUid]]:
        """Return, by gang, the pods that are counted as holding a live lease of it."""
        counted: dict[str, set[PodUid]] = {}
        for gang, pod in await self._connection.run("query", "gangs"):
            counted.setdefault(gang, set()).add(PodUid(pod))
        return {gang: frozenset(pods) for gang, pods in counted.items()}

    async def save_quotas(self, quotas: Sequence[Quota], *, told_at: float) -> bool:
        """Make these all quotas that there are; True if that is news. Older news is passed over.

        Leases that are there are counted anew, in one step; none ends. Possible at any time, also
        before the ledger was ever used: a rebuild leaves quotas alone.
        """
        rows = [quota_row(quota) for quota in quotas]
        return bool(await self._connection.run("quotas", "save", rows, told_at, state="any"))

    async def quota_accounts(self) -> QuotaTotals:
        """Return quotas, what is held and what is charged under them, read at one moment."""
        return accounts_of(*await self._connection.run_raw("quotas", "read"))

    async def turns(self) -> FairShare:
        """Return what decides in which order pods that wait are offered what is freed."""
        total, cores, mib, rights = await self._connection.run("query", "fair_share")
        by_cores = dict(zip(cores[::2], map(int, cores[1::2]), strict=True))
        by_mib = dict(zip(mib[::2], map(int, mib[1::2]), strict=True))
        return FairShare(
            total=GpuAmount(cores_percent=int(total[0]), memory_mib=int(total[1])),
            used={
                Namespace(name): GpuAmount(
                    cores_percent=by_cores.get(name, 0), memory_mib=by_mib.get(name, 0)
                )
                for name in sorted({*by_cores, *by_mib})
            },
            entitlements={
                Namespace(name): Entitlement(
                    weight=int(share), has_budget=not is_out, may_start=not is_held
                )
                for name, is_out, share, is_held in rights
            },
        )

    async def _survey(
        self, names: Sequence[str], *, with_leases: bool = False
    ) -> tuple[list[Any], Iterator[bytes]]:
        packed, *values = await self._connection.run_raw("read_nodes", names, with_leases)
        return unpacked(packed), iter(values)
