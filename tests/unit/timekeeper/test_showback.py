"""Ledgers are added up page by page, however long they are."""

import tracemalloc
from dataclasses import dataclass

from shared.ledger.budgets import Budgets
from shared.ledger.showback import EntryRange, add_up
from shared.model.budget import ChargeEntry
from shared.model.names import Namespace

PAGE = 500


@dataclass
class Endless(Budgets):
    """A ledger of so many pages, each made on request."""

    pages: int

    async def entries(
        self, namespace: Namespace, *, after: str = "", most: int = PAGE
    ) -> list[ChargeEntry]:
        begin = int(after or 0)
        return [
            ChargeEntry(
                id=str(number),
                window="2031-05",
                kind="charge",
                units=10,
                lease="a",
                from_ms=10 * number,
                to_ms=10 * number + 10,
                weight=1,
                reason=f"{namespace} {number:0500}",
            )
            for number in range(begin + 1, min(begin + most, self.pages * PAGE) + 1)
        ]


async def test_a_long_ledger_is_summed_with_the_memory_of_one_page() -> None:
    tracemalloc.start()
    try:
        (row,) = await add_up(Endless(pages=40), [Namespace("team-a")], EntryRange())
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert (row.units, row.leases, row.wall_ms) == (40 * PAGE * 10, 1, 40 * PAGE * 10)
    assert most_bytes < 5_000_000, "40 pages are 20 MB"
