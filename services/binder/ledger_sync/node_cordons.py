"""Tells all others which nodes are shut, and opens them as soon as their agents answer."""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Protocol

from services.binder.bind.agent_presence import AgentPresence
from shared.model.names import NodeName

LOOK_S = 1.0
IDLE_S = 5.0
"""While no node is shut: another binder that shut one opens it, too, unless it has died."""


class ShutNodes(Protocol):
    """The ledger's list."""

    async def generation(self) -> str | None:
        """Return the name of the ledger's present life; None while it is to be rebuilt."""
        ...

    async def set_cordoned(self, reasons: Mapping[NodeName, str]) -> frozenset[NodeName]:
        """Record why nodes are shut, or (empty) that they are open; return all that are shut."""
        ...


class NodeCordons:
    """Any number of binders may do so at once: what one has heard last counts."""

    def __init__(self, ledger: ShutNodes, presence: AgentPresence) -> None:
        self.ledger = ledger
        self.presence = presence
        self.shut: frozenset[NodeName] = frozenset()

    async def step(self) -> None:
        """Tell what is new, ask the agents of shut nodes, and tell what they say."""
        self.presence.news.clear()
        if await self.ledger.generation() is None:
            return
        await self._tell()
        if self.shut:
            await self.presence.look()
            if self.presence.words():
                await self._tell()

    async def wait(self) -> None:
        """Return when there is news, or after a moment."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S if self.shut else IDLE_S):
                await self.presence.news.wait()

    async def _tell(self) -> None:
        words = self.presence.words()
        self.shut = await self.ledger.set_cordoned(words)
        self.presence.apply_cordons(self.shut, words)
