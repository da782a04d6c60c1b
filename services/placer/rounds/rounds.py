"""Rounds: decide, reserve, and repeat for pods the ledger disagreed on, gangs as one.

Of a gang, enough pods are placed together, then the rest one by one.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from services.placer.rounds.batch import DecisionContext, RoundDecisions, decide, waiting_pod
from services.placer.rounds.decision_writer import DecisionWriter, PlacementEvent
from services.placer.rounds.gang_decision import (
    GANG_NOT_DECIDED,
    changed_verdicts,
    choose_offer_recipients,
    decide_gang,
    gang_does_not_fit,
    gang_too_small,
    member_refused,
)
from shared.model.clock import Clock
from shared.model.errors import ConflictError
from shared.model.events.pod_events import PodQueued
from shared.model.ledger import GangEnrollment
from shared.model.names import PodUid
from shared.model.placement import Refusal
from shared.model.request import Gang

ROUNDS = 10
"""Rounds of a batch before its events go back to the queue."""
ROUND_PAUSE_S = 0.005
"""Pause for the feed to deliver changes to the mirror."""


@dataclass(eq=False)
class PodRounds:
    """Decides for pods one by one until the ledger agrees with each decision."""

    context: DecisionContext
    writer: DecisionWriter
    clock: Clock

    async def place(
        self,
        undecided: Sequence[PodQueued],
        events: list[PlacementEvent],
        gang: Gang | None = None,
    ) -> None:
        """Place pods, or further ones of a `gang` that runs, and add their events.

        Raises ConflictError after too many rounds, and if the gang has ended meanwhile.
        """
        for _ in range(ROUNDS):
            undecided = await self._round(undecided, events, gang)
            if not undecided:
                return
            self.context.read_changes()
            await self.clock.sleep(ROUND_PAUSE_S)
        raise ConflictError(
            f"{len(undecided)} pods are undecided: the ledger changed {ROUNDS} times"
        )

    async def _round(
        self, pods: Sequence[PodQueued], events: list[PlacementEvent], gang: Gang | None
    ) -> list[PodQueued]:
        """Decide once for all; return those that need another round."""
        capacity = self.context.mirror.capacity
        decisions = decide(pods, self.context)
        undecided = await self.writer.reserve(decisions, events, gang) if decisions.chosen else []
        undecided += await self.writer.defer(decisions.deferred)
        refused = decisions.refused
        if decisions.ledger_disagreed:
            return [*undecided, *(pod for pod, _ in refused)]
        result = await self.writer.write_refusals(refused, capacity, events)
        return [*undecided, *(pod for pod, _ in refused if pod.pod in result.stale)]


@dataclass(eq=False)
class GangRounds:
    """Decides for all waiting pods of a gang until the ledger agrees."""

    context: DecisionContext
    writer: DecisionWriter
    pod_rounds: PodRounds
    clock: Clock

    async def place(
        self, gang: Gang, pods: Sequence[PodQueued], events: list[PlacementEvent]
    ) -> None:
        """Place a gang of which some pods were just queued, and add events of all its pods.

        Pods beyond the gang's minimum are placed one by one once it runs. Raises ConflictError
        after too many rounds.
        """
        answered: set[PodUid] = set()
        for _ in range(ROUNDS):
            enrollment = await self._enroll(gang, pods)
            pods = self._without_gone(pods, enrollment)
            leased = [lease for lease in enrollment.leases if lease.pod not in answered]
            answered.update(lease.pod for lease in leased)
            self.writer.repeat_leases(leased, pods, events)
            members = {waiting.queued.pod: waiting.queued for waiting in enrollment.waiting}
            members |= {pod.pod: pod for pod in pods if pod.pod not in answered}
            if gang.min_member <= enrollment.live_count or not members:
                await self.pod_rounds.place(list(members.values()), events, gang)
                return
            spare = await self._round(gang, enrollment, members, events)
            if spare is not None:
                await self.pod_rounds.place(spare, events, gang)
                return
            self.context.read_changes()
            await self.clock.sleep(ROUND_PAUSE_S)
        raise ConflictError(f"gang {gang.name} is undecided: the ledger changed {ROUNDS} times")

    def _without_gone(
        self, pods: Sequence[PodQueued], enrollment: GangEnrollment
    ) -> Sequence[PodQueued]:
        self.writer.drop_gone(enrollment.gone)
        return [pod for pod in pods if pod.pod not in enrollment.gone]

    async def _enroll(self, gang: Gang, pods: Sequence[PodQueued]) -> GangEnrollment:
        capacity, now = self.context.mirror.capacity, self.clock.now()
        return await self.writer.ledger.waiting_pods.enroll(
            gang,
            [
                waiting_pod(pod, GANG_NOT_DECIDED, capacity, now, receives_offers=False)
                for pod in pods
            ],
        )

    async def _round(
        self,
        gang: Gang,
        enrollment: GangEnrollment,
        members: Mapping[PodUid, PodQueued],
        events: list[PlacementEvent],
    ) -> list[PodQueued] | None:
        """Decide once; return the pods that the gang runs without, or None for another round."""
        capacity = self.context.mirror.capacity
        live, waiting, pods = (
            enrollment.live_count,
            enrollment.waiting_count,
            list(members.values()),
        )
        if live + waiting < gang.min_member:
            refusal = gang_too_small(gang, live=live, waiting=waiting)
            return await self._refuse(
                pods, enrollment, refusal, events, capacity=capacity, min_members=gang.min_member
            )
        decision = decide_gang(pods, gang.min_member - live, self.context)
        if decision.refusal is None:
            decisions = RoundDecisions(chosen=decision.chosen)
            spare = await self._reserve(gang, pods, decisions, events)
            if not decisions.refused:
                return spare
            refusal = member_refused(gang, *decisions.refused[0])
            return await self._refuse(pods, enrollment, refusal, events, capacity=capacity)
        refusal = gang_does_not_fit(
            gang,
            live=live,
            fitting=decision.fitting,
            refusal=decision.refusal,
            impossible=decision.impossible,
        )
        recipients = choose_offer_recipients(pods)
        return await self._refuse(
            pods, enrollment, refusal, events, capacity=capacity, recipients=recipients
        )

    async def _reserve(
        self,
        gang: Gang,
        pods: Sequence[PodQueued],
        decisions: RoundDecisions,
        events: list[PlacementEvent],
    ) -> list[PodQueued] | None:
        undecided = await self.writer.reserve(decisions, events, gang, together=True)
        if decisions.deferred:
            return None if await self.writer.defer(decisions.deferred) else []
        if undecided or decisions.gone:
            return None
        chosen = {pod.pod for pod, _ in decisions.chosen}
        return [pod for pod in pods if pod.pod not in chosen]

    async def _refuse(
        self,
        pods: Sequence[PodQueued],
        enrollment: GangEnrollment,
        refusal: Refusal,
        events: list[PlacementEvent],
        *,
        capacity: int,
        recipients: Collection[PodUid] = (),
        min_members: int = 0,
    ) -> list[PodQueued] | None:
        is_published = self.writer.last_verdicts.is_published
        unpublished = (pod.pod for pod in pods if not is_published(pod, refusal))
        changed = changed_verdicts(pods, enrollment, refusal, {*recipients, *unpublished})
        result = await self.writer.write_refusals(
            [(pod, refusal) for pod in changed], capacity, events, recipients, min_members
        )
        return None if result.stale or result.already_leased or result.gone else []
