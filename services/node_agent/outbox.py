"""Events on their way from the kubelet's questions to the bus, which may be away for a while."""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from shared.model.events.node_events import ShareActivated, ShareRefused

MAX_EVENTS = 4096


@dataclass(slots=True)
class Outbox:
    """Events on their way to the bus."""

    events: deque[ShareActivated | ShareRefused] = field(
        default_factory=lambda: deque(maxlen=MAX_EVENTS)
    )
    there: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, event: ShareActivated | ShareRefused) -> None:
        """Add an event; with NATS away for long the oldest go, and device reports tell the same."""
        self.events.append(event)
        self.there.set()

    async def take(self) -> list[ShareActivated | ShareRefused]:
        """Wait for events and take them all."""
        await self.there.wait()
        self.there.clear()
        taken = list(self.events)
        self.events.clear()
        return taken
