"""Cordons of nodes whose agents do not respond, kept in the ledger until the agents reply."""

import asyncio
import contextlib

from services.binder.bind.agent_presence import AgentPresence
from services.binder.ports.ledger import CordonLedger
from shared.model.names import NodeName

PROBE_S = 1.0
IDLE_S = 5.0
"""While no node is cordoned: a binder that cordoned one also uncordons it, unless it has died."""


class NodeCordons:
    """Any number of binders may run it at once: the latest reply that one received counts."""

    def __init__(self, ledger: CordonLedger, presence: AgentPresence) -> None:
        self.ledger = ledger
        self.presence = presence
        self.cordoned: frozenset[NodeName] = frozenset()

    async def step(self) -> None:
        """Save changes, probe the agents of cordoned nodes, and save what that changes."""
        self.presence.changed.clear()
        if await self.ledger.generation() is None:
            return
        await self._save()
        if self.cordoned:
            await self.presence.probe_cordoned()
            if self.presence.cordon_changes():
                await self._save()

    async def wait(self) -> None:
        """Return when something has changed, or after a pause."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PROBE_S if self.cordoned else IDLE_S):
                await self.presence.changed.wait()

    async def _save(self) -> None:
        changes = self.presence.cordon_changes()
        self.cordoned = await self.ledger.set_cordoned(changes)
        self.presence.apply_cordons(self.cordoned, changes)
