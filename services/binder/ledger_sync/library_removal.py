"""Removes the ledger's functions of versions that run no more from Redis."""

import logging
from dataclasses import dataclass

from shared.ledger.function_libraries import FunctionLibraries
from shared.runtime.service import loops

logger = logging.getLogger(__name__)

NOTE_S = 600.0
"""The interval at which a binder notes which library it uses: libraries are kept for a day."""


@dataclass(eq=False)
class LibraryRemoval:
    libraries: FunctionLibraries

    @loops(every_s=NOTE_S)
    async def remove_unused(self) -> None:
        for name in await self.libraries.remove_unused():
            logger.info("deleted the functions %s, which no binder has used for a day", name)
