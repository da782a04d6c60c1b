"""The files with the CDI specifications of claims, one for each."""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from services.node_agent.allocate.cdi_files import write_specification
from services.node_agent.dra.claim_cdi import (
    build_claim_specification,
    claim_of_file,
    file_name,
)
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from shared.model.errors import UnavailableError
from shared.model.names import PodUid


class ClaimFiles:
    """The files of one node."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    async def write(self, claim: PodUid, entries: Iterable[CheckpointEntry]) -> None:
        """Write a claim's file; raises UnavailableError naming what cannot be written."""
        specification = build_claim_specification(entries)
        if specification is not None:
            path = self.directory / file_name(claim)
            await asyncio.to_thread(write_specification, path, specification)

    async def remove(self, claim: PodUid) -> None:
        """Remove a claim's file; raises UnavailableError if it stays."""
        path = self.directory / file_name(claim)
        try:
            await asyncio.to_thread(path.unlink, missing_ok=True)
        except OSError as error:
            raise UnavailableError(f"{path} cannot be removed: {error.strerror}") from error

    async def restore(self, claims: Mapping[PodUid, Sequence[CheckpointEntry]]) -> None:
        """Write the files of these claims if they are lost, as after a reboot; remove others."""
        for claim, entries in claims.items():
            await self.write(claim, entries)
        await asyncio.to_thread(self._remove_others, claims.keys())

    def _remove_others(self, claims: Iterable[PodUid]) -> None:
        live = set(claims)
        with contextlib.suppress(OSError):
            for path in self.directory.iterdir():
                claim = claim_of_file(path.name)
                if claim is not None and claim not in live:
                    path.unlink(missing_ok=True)
