"""The file with the last use of each share, which the agent's successor continues."""

import asyncio
import logging
from pathlib import Path

import msgspec

from services.node_agent.usage.idle_shares import LastUses

logger = logging.getLogger(__name__)

SAVE_S = 15.0
"""Interval between writes: less than an agent may be away without a gap in its observations."""


class LastUseFile:
    """Written every `save_s` and replaced in one step, but not flushed to the disk.

    It survives a crash of the agent. After one of the machine nothing runs that could be idle.
    """

    def __init__(self, path: Path, *, save_s: float = SAVE_S) -> None:
        self.path = path
        self.save_s = save_s
        self._saved_at = float("-inf")

    async def load(self) -> LastUses | None:
        """Return the record; None: there is none that can be read."""
        try:
            data = await asyncio.to_thread(self.path.read_bytes)
            return msgspec.json.decode(data, type=LastUses)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            logger.warning("%s is not used: since when shares are idle starts anew: %s",
                           self.path, error)  # fmt: skip
            return None

    async def save(self, record: LastUses) -> None:
        """Write the record if the last write was `save_s` ago; a failure is logged."""
        if abs(record.observed_at - self._saved_at) < self.save_s:
            return
        try:
            await asyncio.to_thread(self._replace, msgspec.json.encode(record))
            self._saved_at = record.observed_at
        except OSError as error:
            logger.debug("%s was not written: %s", self.path, error)

    def _replace(self, data: bytes) -> None:
        draft = self.path.with_suffix(".new")
        draft.write_bytes(data)
        draft.replace(self.path)
