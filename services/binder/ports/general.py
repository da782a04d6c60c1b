"""What the binder needs besides the ledger, where no file of its own says so."""

from collections.abc import Sequence
from typing import Protocol

from shared.model.events.event import Event
from shared.model.events.node_events import ViolationFound
from shared.model.events.pod_events import BudgetChanged, PlacementChosen


class Publishing(Protocol):
    """The bus, for what cannot wait for a handler's answer."""

    async def publish(self, events: Sequence[Event]) -> None:
        """Publish events; raises UnavailableError if that could not be confirmed."""
        ...


class Preemptor(Protocol):
    """Preemptions: leases that end early; implemented by `PreemptionController`."""

    async def hear(self, events: Sequence[BudgetChanged]) -> None:
        """Remember how budgets stand."""
        ...

    async def evict_violators(self, events: Sequence[ViolationFound]) -> None:
        """Begin to evict pods for what they did, if the rules have them evicted."""
        ...

    async def step(self) -> list[PlacementChosen]:
        """Move on what is under way, begin what is due; return the leases that came of it."""
        ...
