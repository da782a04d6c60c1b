"""The libraries of functions on the server, one for each version of the services."""

from shared.ledger.connection import LedgerPart


class FunctionLibraries(LedgerPart):
    async def remove_unused(self) -> list[str]:
        """Delete libraries that no binder has used for a day, and return their names."""
        names = await self._connection.library_names()
        own = self._connection.library.name
        unused: list[str] = await self._connection.run("keep_library", own, names, state="any")
        for name in unused:
            await self._connection.delete_library(name)
        return unused
