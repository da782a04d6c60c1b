"""Planned starts, carried out: the devices are handed over when their time has come."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from services.binder.plans.claimed_devices import placement_of, placements_among, reserve_claimed
from services.binder.report.event_writer import ConditionWriter, EventRecorder
from services.binder.report.explanations import NO_END, PLANNED, WITHDRAWN, event_of
from shared.ledger.leases import RedisLeases
from shared.ledger.preemptions import Preemptions
from shared.model.clock import Clock
from shared.model.errors import UnavailableError
from shared.model.events.plan_events import StartDecision, StartReported
from shared.model.events.pod_events import PlacementChosen
from shared.model.leases.lease import LeaseState
from shared.model.leases.ledger import WaitingPod
from shared.model.leases.preemption import MOST_START_EVENTS, PromiseOutcome, StoredStart
from shared.model.names import PodUid
from shared.placing.starts import LATE_S
from shared.runtime.service import handles

MISSING_S = 10.0
"""A start is given up if its pods neither wait nor have a lease for so long: a placer decides about
a pod sooner, so the pod has ended, and its event was lost."""

REASONS = {
    StartDecision.PLANNED: PLANNED,
    StartDecision.WITHDRAWN: WITHDRAWN,
    StartDecision.UNKNOWN: NO_END,
}


@dataclass(eq=False, kw_only=True)
class PlannedStarts:
    ledger: RedisLeases
    store: Preemptions
    events: EventRecorder
    conditions: ConditionWriter
    clock: Clock

    def __post_init__(self) -> None:
        self._missing_since = dict[str, float]()
        """When pods of a start, by its ID, were first missing."""

    @handles
    async def show_starts(self, events: Sequence[StartReported]) -> None:
        """Write what the planner has decided, as Events and in the pods' conditions.

        Messages may be late: a start that has ended is not shown, and the condition of a pod with
        another start stays.
        """
        state = await self.store.state(now=self.clock.now(), past_s=0)
        stored = {pod: start.opened_at for start in state.starts for pod in start.pods}
        for event in events:
            opened_at = stored.get(event.pod, 0.0)
            if event.opened_at and event.opened_at != opened_at:
                continue
            is_warning = event.decision is StartDecision.WITHDRAWN
            explanation = event_of(event, REASONS[event.decision], event.text, warning=is_warning)
            if event.text:
                self.events.record(explanation, once=event.once)
            if event.opened_at == opened_at:
                self.conditions.explain(explanation)

    async def advance(self, starts: Sequence[StoredStart]) -> list[PlacementChosen]:
        stored = {start.id for start in starts}
        for id_ in self._missing_since.keys() - stored:
            del self._missing_since[id_]
        return [placement for start in starts for placement in await self._advance(start)]

    async def _advance(self, start: StoredStart) -> list[PlacementChosen]:
        pods = start.pods
        # In this order, so that a pod that got a lease meanwhile is never observed without either.
        waiting = await self.ledger.waiting_pods.load(pods)
        leases = await self.ledger.load([*pods, *(lease.pod for lease in start.waits_for)])
        own = leases[: len(pods)]
        before = leases[len(pods) :]
        missing = set(pods) - {pod.queued.pod for pod in waiting}
        gone = set[PodUid]()
        if missing:
            gone = await self.ledger.waiting_pods.list_gone(sorted(missing))
        if any(own) or gone:
            reason = f"{'other pods' if any(own) else 'too few pods'} of its gang start"
            leased = {lease.pod for lease in own if lease}
            await self._withdraw(start, reason, set(pods) - gone - leased, is_needed=False)
            return [
                placement_of(lease) for lease in own if lease and lease.state is LeaseState.RESERVED
            ]
        now = self.clock.now()
        is_late = now > start.at + LATE_S
        if not missing:
            self._missing_since.pop(start.id, None)
        elif not is_late:  # a placer decides again about them: they wait again soon
            if now - self._missing_since.setdefault(start.id, now) > MISSING_S:
                await self._withdraw(start, "its pods no longer wait", is_needed=False)
            return []
        running = [
            ending
            for ending, lease in zip(start.waits_for, before, strict=True)
            if lease is not None
        ]
        if not running and not is_late:
            return await self._reserve(start, waiting)
        if is_late:
            reason = f"{start.name_of(running[0])} still runs" if running else "there is no room"
            await self._withdraw(start, reason)
        return []

    async def _reserve(
        self, start: StoredStart, waiting: Sequence[WaitingPod]
    ) -> list[PlacementChosen]:
        results = await reserve_claimed(
            self.ledger, start.wanted, waiting, gang=start.gang, now=self.clock.now()
        )
        reason = next((result for result in results.values() if isinstance(result, str)), "")
        if reason:
            await self._withdraw(start, reason)
        elif len(results) == len(start.wanted):
            await self.store.close_start(start, start.ended(PromiseOutcome.KEPT, self.clock.now()))
        # Where some are missing, it is tried again until it is late.
        return placements_among(results)

    async def _withdraw(
        self,
        start: StoredStart,
        reason: str,
        shown_to: Container[PodUid] | None = None,
        *,
        is_needed: bool = True,
    ) -> None:
        outcome = PromiseOutcome.WITHDRAWN if is_needed else PromiseOutcome.NOT_NEEDED
        try:
            if not await self.store.close_start(start, start.ended(outcome, self.clock.now())):
                return
        except UnavailableError:  # it may have been closed all the same
            self._record_withdrawal(start, reason, shown_to)
            raise
        self._record_withdrawal(start, reason, shown_to)

    def _record_withdrawal(
        self, start: StoredStart, reason: str, shown_to: Container[PodUid] | None
    ) -> None:
        text = start.withdrawn_text(reason)
        pods = [pod for pod in start.wanted if shown_to is None or pod.pod in shown_to]
        for pod in pods[:MOST_START_EVENTS]:
            event = event_of(pod, WITHDRAWN, text)
            self.events.record(event)
            self.conditions.explain(event)
