"""The placer: waiting pods in, reservations and refusals out.

Replicas share one queue and know nothing of each other: each decides on its own mirror of the
ledger, and the ledger checks that what was decided still fits.
"""

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Protocol

from services.placer.choice.batch import KEPT, Decided, decide, reservation_of, verdict_of
from services.placer.choice.gangs import (
    COUNTED,
    decide_gang,
    lacking,
    leaders,
    too_few,
    units_of,
    unwritten,
)
from services.placer.index.node_index import Index
from services.placer.mirror.cluster_mirror import Mirror
from services.placer.refusal.last_verdicts import Told
from services.placer.refusal.quotas import QuotasMet
from shared.model.clock import Clock
from shared.model.errors import ConflictError, UnavailableError
from shared.model.events.pod_events import (
    LargestDeviceReported,
    PlacementChosen,
    PlacementRefused,
    PodQueued,
)
from shared.model.lease import Lease, LeaseState
from shared.model.ledger import (
    RESERVED_FOR_OTHER,
    AlreadyLeased,
    FeedTruncatedError,
    GangEnrollment,
    GangIncomplete,
    LedgerChange,
    NoCapacity,
    Reservation,
    ReservationOutcome,
    Reserved,
    Snapshot,
    WaitingPod,
    WaitResult,
)
from shared.model.names import PodUid
from shared.model.placement import Refusal
from shared.model.request import Gang
from shared.runtime.service import emits, handles, loops

ROUNDS = 10
"""Times a batch decides before it gives the events back to the queue."""
PAUSE_S = 0.005
"""What the feed is given to bring news that the ledger has and the mirror lacks."""
BLIND_S = 10.0
"""A mirror cut off from the ledger for longer decides nothing any more."""
TOLD_EVERY_S = 5.0
"""How often others hear of the largest device."""


class PlacerWaitingPods(Protocol):
    """What the placer writes about pods that fit nowhere yet."""

    async def enroll(self, gang: Gang, enrolled: Sequence[WaitingPod]) -> GangEnrollment:
        """Let pods of a gang wait, and count the gang."""
        ...

    async def enqueue(self, verdicts: Sequence[WaitingPod]) -> WaitResult:
        """Let pods wait; return those whose verdict is stale, and leases of those that hold one."""
        ...


class Ledger(Protocol):
    """What the placer needs of the ledger."""

    async def reserve(
        self, wanted: Sequence[Reservation], *, now: float, ttl_s: float
    ) -> list[ReservationOutcome]:
        """Reserve a group; each reservation takes the first of its candidates that fits."""
        ...

    async def reserve_gang(
        self, gang: Gang, wanted: Sequence[Reservation], *, now: float, ttl_s: float
    ) -> list[ReservationOutcome]:
        """Reserve for all of the pods or none; `gang.min_member` of it must hold leases then."""
        ...

    @property
    def waiting_pods(self) -> PlacerWaitingPods:
        """The pods that fit nowhere yet."""
        ...

    async def snapshot(self) -> Snapshot:
        """Return all nodes."""
        ...

    def changes(self, position: str) -> AsyncIterator[list[LedgerChange]]:
        """Yield what changes after the position. Raises FeedLostError if it is too old."""
        ...


class Tally(Protocol):
    """Counts what became of decisions."""

    def count(self, outcome: str, amount: int = 1) -> None:
        """Add to the number of an outcome."""
        ...


Answer = PlacementChosen | PlacementRefused


class Placer:
    """Decides for batches of pods; two events for one pod end in one lease."""

    def __init__(
        self,
        ledger: Ledger,
        clock: Clock,
        tally: Tally,
        draw: Callable[[], float],
        *,
        ttl_s: float,
    ) -> None:
        self.ledger = ledger
        self.clock = clock
        self.tally = tally
        self.draw = draw
        self.ttl_s = ttl_s
        self.mirror = Mirror()
        self.index = Index(self.mirror)
        self.quotas = QuotasMet()
        self.capacity = -1
        """The ledger's capacity number that the mirror has reached; -1 before any snapshot."""
        self._blind_since: float | None = None
        self._told = Told()

    def missing(self) -> str | None:
        """Say what keeps the placer from deciding, or None."""
        if self.capacity < 0:
            return "no snapshot of the ledger yet"
        if self._blind_since is None:
            return None
        blind_s = self.clock.now() - self._blind_since
        return f"cut off from the ledger for {blind_s:.0f} s" if blind_s > BLIND_S else None

    @handles
    async def place_pods(self, events: Sequence[PodQueued]) -> list[Answer]:
        """Decide, reserve and answer; what the ledger finds taken is decided afresh."""
        missing = self.missing()
        if missing is not None:
            raise UnavailableError(missing)
        self.mirror.forget_counted()
        self.quotas.clear()
        newest = {event.pod: event for event in events}
        answers: list[Answer] = []
        try:
            for unit in units_of(newest.values()):
                if unit.gang is None:
                    await self._decide(unit.pods, answers)
                else:
                    await self._decide_gang(unit.gang, unit.pods, answers)
        except BaseException:
            # The events come again, and what was to be said of them must then be said.
            for pod in newest:
                self._told.forget(pod)
            raise
        return answers

    @loops
    async def follow(self) -> None:
        """Keep the mirror up to date: a snapshot, then every change."""
        try:
            snapshot = await self.ledger.snapshot()
            self.mirror.reset(snapshot.nodes)
            self.capacity = snapshot.capacity
            self._blind_since = None
            async for changes in self.ledger.changes(snapshot.position):
                for change in changes:
                    self._learn_change(change)
        except FeedTruncatedError:
            self.tally.count("feed_lost")
        finally:
            if self._blind_since is None:
                self._blind_since = self.clock.now()

    @emits
    async def largest(self) -> AsyncIterator[Sequence[LargestDeviceReported]]:
        """Tell how large the largest device is, for those who know no devices."""
        while True:
            memory_mib, memory_units = self.mirror.largest() if self.missing() is None else (0, 0)
            if memory_mib:
                now = self.clock.now()
                told = LargestDeviceReported(
                    memory_mib=memory_mib, memory_units=memory_units, reported_at=now
                )
                yield [told]
            await self.clock.sleep(TOLD_EVERY_S)

    async def _decide(self, undecided: Sequence[PodQueued], answers: list[Answer]) -> None:
        for _ in range(ROUNDS):
            undecided = await self._round(undecided, answers)
            if not undecided:
                return
            await self.clock.sleep(PAUSE_S)
        raise ConflictError(f"{len(undecided)} pods found the ledger changed {ROUNDS} times")

    async def _round(self, pods: Sequence[PodQueued], answers: list[Answer]) -> list[PodQueued]:
        """Decide for all once; return those for whom it must be done again."""
        capacity = self.capacity
        decided = decide(pods, self.mirror, self.index, self.draw, self.quotas)
        again = await self._reserve(decided, answers) if decided.chosen else []
        again += await self._keep_back(decided.kept_back)
        if decided.is_disturbed:
            return [*again, *(event for event, _ in decided.refused)]
        waited = await self._write_refusals(decided.refused, capacity, answers)
        return [*again, *(event for event, _ in decided.refused if event.pod in waited.stale)]

    async def _decide_gang(
        self, gang: Gang, events: Sequence[PodQueued], answers: list[Answer]
    ) -> None:
        """Decide for all waiting pods of a gang, a few of which have just been told of.

        Those that the gang can do without are decided one by one, once it runs.
        """
        told: set[PodUid] = set()
        for _ in range(ROUNDS):
            capacity, now = self.capacity, self.clock.now()
            muster = await self.ledger.waiting_pods.enroll(
                gang, [verdict_of(event, COUNTED, capacity, now, leads=False) for event in events]
            )
            leased = [lease for lease in muster.leases if lease.pod not in told]
            told.update(lease.pod for lease in leased)
            answers += [PlacementChosen(lease=lease, trace=lease.trace) for lease in leased]
            pods = {waiting.queued.pod: waiting.queued for waiting in muster.waiting}
            pods |= {event.pod: event for event in events if event.pod not in told}
            if gang.min_member <= muster.live_count:
                await self._decide(list(pods.values()), answers)
                return
            spare = await self._round_of_gang(gang, muster, pods, answers)
            if spare is not None:
                await self._decide(spare, answers)
                return
            await self.clock.sleep(PAUSE_S)
        raise ConflictError(f"gang {gang.name} found the ledger changed {ROUNDS} times")

    async def _round_of_gang(
        self,
        gang: Gang,
        muster: GangEnrollment,
        pods: Mapping[PodUid, PodQueued],
        answers: list[Answer],
    ) -> list[PodQueued] | None:
        """Decide once for a gang; return the pods it runs without, or None to do it again."""
        capacity, live, members = self.capacity, muster.live_count, list(pods.values())
        leading: Collection[PodUid] = ()
        fewer_than = 0
        if live + muster.waiting_count < gang.min_member:
            why, fewer_than = too_few(gang, live=live, here=muster.waiting_count), gang.min_member
        else:
            needed = gang.min_member - live
            found = decide_gang(
                members, needed, self.mirror, self.index, self.draw, quotas=self.quotas
            )
            if found.refusal is None:
                decided = Decided(chosen=found.chosen)
                again = await self._reserve(decided, answers, gang)
                if decided.kept_back:
                    return None if await self._keep_back(decided.kept_back) else []
                if again:
                    return None
                chosen = {event.pod for event, _ in found.chosen}
                return [event for event in members if event.pod not in chosen]
            why = lacking(gang, live=live, fitting=found.fitting, refusal=found.refusal)
            leading = leaders(members)
        refused = [(event, why) for event in unwritten(members, muster, why, leading)]
        waited = await self._write_refusals(refused, capacity, answers, leading, fewer_than)
        return None if waited.stale or waited.already_leased else []

    async def _reserve(
        self, decided: Decided, answers: list[Answer], gang: Gang | None = None
    ) -> list[PodQueued]:
        """Reserve for the chosen, with a `gang` all or nothing; return those who got nothing."""
        wanted = [reservation_of(event, candidates) for event, candidates in decided.chosen]
        now, ttl_s, capacity = self.clock.now(), self.ttl_s, self.capacity
        try:
            if gang is None:
                outcomes = await self.ledger.reserve(wanted, now=now, ttl_s=ttl_s)
            else:
                outcomes = await self.ledger.reserve_gang(gang, wanted, now=now, ttl_s=ttl_s)
        except BaseException:
            for event, _ in decided.chosen:
                self.mirror.drop(event.pod)
            raise
        again: list[PodQueued] = []
        for (event, candidates), outcome in zip(decided.chosen, outcomes, strict=True):
            match outcome:
                case Reserved(lease=lease):
                    self.mirror.settle(lease)
                    first = lease.node == candidates[0].node
                    decided.is_disturbed |= not first
                    self.tally.count("reserved" if first else "reserved_other")
                    answers.append(self._chosen(event, lease))
                case AlreadyLeased(lease=lease):
                    self.mirror.drop(event.pod)
                    decided.is_disturbed = True
                    self.tally.count("held")
                    answers += self._answer_held(event, lease)
                case NoCapacity():
                    self._learn_full(outcome)
                    self.quotas.learn(event, outcome.quotas, capacity)
                    decided.is_disturbed = True
                    self.tally.count("kept" if outcome.reserved_for_other else "full")
                    (decided.kept_back if outcome.reserved_for_other else again).append(event)
                case GangIncomplete():
                    self.mirror.drop(event.pod)
                    self.tally.count("withheld")
                    again.append(event)
        return again

    def _answer_held(self, event: PodQueued, lease: Lease) -> list[PlacementChosen]:
        """Say again which lease the pod holds, until its node has taken it up."""
        return [] if lease.state is LeaseState.ACTIVE else [self._chosen(event, lease)]

    def _chosen(self, event: PodQueued, lease: Lease) -> PlacementChosen:
        self._told.forget(event.pod)
        return PlacementChosen(lease=lease, trace=event.trace)

    async def _write_refusals(
        self,
        refused: Sequence[tuple[PodQueued, Refusal]],
        capacity: int,
        answers: list[Answer],
        leading: Collection[PodUid] | None = None,
        fewer_than: int = 0,
    ) -> WaitResult:
        """Write down who waits and answer them, unless freed capacity may help by now.

        What is freed is offered to those `leading`; None: to all. With `fewer_than`, unless so many
        of their gang are here by now.
        """
        if not refused:
            return WaitResult()
        now = self.clock.now()
        verdicts = [
            verdict_of(
                event,
                why,
                self.quotas.decided_at(event, capacity),
                now,
                leads=leading is None or event.pod in leading,
                fewer_than=fewer_than,
            )
            for event, why in refused
        ]
        waited = await self.ledger.waiting_pods.enqueue(verdicts)
        self.quotas.forget(event for event, _ in refused if event.pod in waited.stale)
        stale, held = set(waited.stale), {lease.pod: lease for lease in waited.already_leased}
        self.tally.count("stale", len(stale))
        self.tally.count("held", len(held))
        self.tally.count("refused", len(refused) - len(stale) - len(held))
        for event, refusal in refused:
            if event.pod in held:
                answers += self._answer_held(event, held[event.pod])
            elif event.pod not in stale and self._told.is_news(event, refusal):
                answers.append(
                    PlacementRefused(
                        pod=event.pod,
                        namespace=event.namespace,
                        name=event.name,
                        refusal=refusal,
                        trace=event.trace,
                    )
                )
        return waited

    async def _keep_back(self, kept: Sequence[PodQueued]) -> list[PodQueued]:
        """Let pods wait until what they would take has been offered to others; return the rest.

        Nobody is told: this takes a moment, and ends with a placement or a verdict.
        """
        if not kept:
            return []
        now = self.clock.now()
        waited = await self.ledger.waiting_pods.enqueue(
            [verdict_of(event, KEPT, RESERVED_FOR_OTHER, now, leads=True) for event in kept]
        )
        ready = {*waited.stale, *(lease.pod for lease in waited.already_leased)}
        return [event for event in kept if event.pod in ready]

    def _learn_full(self, full: NoCapacity) -> None:
        self.mirror.drop(full.pod)
        for uuid, use in full.devices.items():
            self.mirror.learn_use(uuid, use)
        for name, node in full.nodes.items():
            self.mirror.learn_used(name, node.used, node.version)

    def _learn_change(self, change: LedgerChange) -> None:
        for node in change.nodes:
            self.mirror.put_node(node)
        for name in change.removed:
            self.mirror.remove_node(name)
        for uuid, use in change.devices.items():
            self.mirror.learn_use(uuid, use)
        for name, node_use in change.used.items():
            self.mirror.learn_used(name, node_use.used, node_use.version)
        self.capacity = change.capacity
