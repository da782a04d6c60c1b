"""Checks of the ledger's own records, page by page: what is missing or cannot be read."""

from collections.abc import Sequence

from shared.ledger.connection import LedgerConnection, LedgerPart
from shared.ledger.server_errors import RebuildPendingError
from shared.model.ledger import CheckedRecords, UnreadableRecord

PAGE = 100
"""Records per kind and step."""
_START = ("0", "0", "0")


class RecordChecks(LedgerPart):
    """Reads all records again and again; a ledger with a fault closes itself to be rebuilt."""

    def __init__(self, connection: LedgerConnection) -> None:
        super().__init__(connection)
        self._cursors: Sequence[str] = _START

    async def step(self, count: int = PAGE) -> CheckedRecords:
        """Check the next pages; nothing while the ledger is being rebuilt.

        Raises UnavailableError if the server may evict keys.
        """
        cursors = self._cursors
        self._cursors = _START
        try:
            found = await self._connection.run("check_records", cursors, count, state="check")
        except RebuildPendingError:
            return CheckedRecords()
        self._cursors, missing, broken, must_list = found
        rows = zip(broken[::3], broken[1::3], broken[2::3], strict=True)
        return CheckedRecords(
            missing=tuple(missing),
            unreadable=tuple(UnreadableRecord(*row) for row in rows),
            must_list=must_list,
        )

    async def unreadable(self) -> list[UnreadableRecord]:
        """Return the records that could not be read in the last 24 hours."""
        names = await self._connection.run("query", "unreadable")
        return [UnreadableRecord(*name.split(" ", 1)) for name in sorted(names)]
