"""Rounds for pods outside gangs: decide, reserve, and repeat for pods the ledger disagreed on."""

from collections.abc import Sequence

from services.placer.rounds.batch import DecisionContext, decide
from services.placer.rounds.decision_writer import DecisionWriter, PlacementEvent
from shared.model.clock import Clock
from shared.model.errors import ConflictError
from shared.model.events.pod_events import PodQueued

ROUNDS = 10
"""Rounds of a batch before its events go back to the queue."""
ROUND_PAUSE_S = 0.005
"""Pause for the feed to bring changes that the ledger has and the mirror lacks."""


class PodRounds:
    """Decides for pods one by one until the ledger agrees with each decision."""

    def __init__(self, context: DecisionContext, writer: DecisionWriter, clock: Clock) -> None:
        self.context = context
        self.writer = writer
        self.clock = clock

    async def place(self, undecided: Sequence[PodQueued], events: list[PlacementEvent]) -> None:
        """Place pods and add their events. Raises ConflictError after too many rounds."""
        for _ in range(ROUNDS):
            undecided = await self._round(undecided, events)
            if not undecided:
                return
            await self.clock.sleep(ROUND_PAUSE_S)
        raise ConflictError(f"{len(undecided)} pods found the ledger changed {ROUNDS} times")

    async def _round(
        self, pods: Sequence[PodQueued], events: list[PlacementEvent]
    ) -> list[PodQueued]:
        """Decide once for all; return those that need another round."""
        capacity = self.context.mirror.capacity
        decisions = decide(pods, self.context)
        undecided = await self.writer.reserve(decisions, events) if decisions.chosen else []
        undecided += await self.writer.defer(decisions.deferred)
        refused = decisions.refused
        if decisions.ledger_disagreed:
            return [*undecided, *(pod for pod, _ in refused)]
        result = await self.writer.write_refusals(refused, capacity, events)
        return [*undecided, *(pod for pod, _ in refused if pod.pod in result.stale)]
