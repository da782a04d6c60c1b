"""The placer: reserves capacity for queued pods, or publishes why there is none.

Replicas share one queue without coordination: the ledger checks that each decision still fits.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from services.placer.metrics import count
from services.placer.rounds.decisions import CandidateCount, DecisionContext, split_into_units
from services.placer.rounds.gang_rounds import GangRounds
from services.placer.rounds.rounds import Rounds
from shared.ledger.leases import RedisLeases
from shared.model.clock import Clock
from shared.model.errors import UnavailableError
from shared.model.events.pod_events import (
    LargestDeviceReported,
    PlacementChosen,
    PlacementRefused,
    PodQueued,
)
from shared.model.leases.ledger import FeedTruncatedError
from shared.placing.index.node_index import NodeIndex
from shared.runtime.ledger_mirror import LedgerMirror
from shared.runtime.service import emits, handles, loops
from shared.runtime.telemetry import Tracing

LARGEST_DEVICE_EVERY_S = 5.0
"""How often the largest device is published."""
FIRST_DEVICE_EVERY_S = 0.5
"""How often a device is looked for while none is known: admission does not know its limit yet."""
RULES_EVERY_S = 0.3
"""How often the counts are compared by which rules about other pods refused waiting ones."""


@dataclass(eq=False)
class Placer:
    """Two events for one pod lead to one lease."""

    ledger: RedisLeases
    clock: Clock
    rng: Callable[[], float]
    ttl_s: float
    tracing: Tracing | None = None

    def __post_init__(self) -> None:
        candidates = CandidateCount()
        self.ledger_mirror = LedgerMirror(
            self.ledger, self.clock, may_pause=lambda: not candidates.contested
        )
        self.mirror = self.ledger_mirror.mirror
        context = DecisionContext(
            NodeIndex(self.mirror), self.rng, self.clock.now, candidates=candidates
        )
        self.rounds = Rounds(
            self.ledger,
            self.clock,
            context,
            self.ttl_s,
            self.tracing,
            self.ledger_mirror.read_now,
        )
        self.gang_rounds = GangRounds(self.rounds)

    def unready_reason(self) -> str | None:
        return self.ledger_mirror.unready_reason()

    @handles
    async def place_pods(
        self, events: Sequence[PodQueued]
    ) -> list[PlacementChosen | PlacementRefused]:
        """Decide, reserve and publish; where the ledger has no room any more, decide again."""
        unready = self.unready_reason()
        if unready is not None:
            raise UnavailableError(unready)
        # A pod to which freed capacity is offered has the capacity number as its requeue number.
        await self.ledger_mirror.reach(max((event.requeue_number for event in events), default=0))
        self.rounds.begin()
        newest = {event.pod: event for event in events}
        try:
            for unit in split_into_units(newest.values()):
                if unit.gang is None:
                    await self.rounds.place(unit.pods)
                else:
                    await self.gang_rounds.place(unit.gang, unit.pods)
        except BaseException:
            self.rounds.forget_published(newest.keys())
            raise
        return self.rounds.events

    @loops
    async def follow_ledger(self) -> None:
        try:
            await self.ledger_mirror.follow()
        except FeedTruncatedError:
            count("feed_truncated")

    @emits
    async def requeue_refused(self) -> AsyncIterator[Sequence[PodQueued]]:
        """Publish refused pods again once what their rules about other pods count has changed."""
        while True:
            await self.clock.sleep(RULES_EVERY_S)
            if self.unready_reason() is None:
                changed = self.rounds.refused.by_rules.take_changed(self.mirror.capacity)
                if changed:
                    yield changed

    @emits
    async def largest_device(self) -> AsyncIterator[Sequence[LargestDeviceReported]]:
        """For services without a mirror."""
        while True:
            memory_mib, memory_units = (
                self.mirror.largest_device() if self.unready_reason() is None else (0, 0)
            )
            if memory_mib:
                event = LargestDeviceReported(memory_mib=memory_mib, memory_units=memory_units)
                yield [event]
            await self.clock.sleep(LARGEST_DEVICE_EVERY_S if memory_mib else FIRST_DEVICE_EVERY_S)
