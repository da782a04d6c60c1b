"""Rounds for gangs: count the gang, place enough of its pods together, then the rest one by one."""

from collections.abc import Collection, Mapping, Sequence

from services.placer.rounds.batch import DecisionContext, RoundDecisions, waiting_pod
from services.placer.rounds.decision_writer import DecisionWriter, PlacementEvent
from services.placer.rounds.gang_decision import (
    GANG_NOT_DECIDED,
    GangDecision,
    changed_verdicts,
    choose_offer_recipients,
    decide_gang,
    gang_does_not_fit,
    gang_too_small,
)
from services.placer.rounds.pod_rounds import ROUND_PAUSE_S, ROUNDS, PodRounds
from shared.model.clock import Clock
from shared.model.errors import ConflictError
from shared.model.events.pod_events import PlacementChosen, PodQueued
from shared.model.ledger import GangEnrollment
from shared.model.names import PodUid
from shared.model.placement import Refusal
from shared.model.request import Gang


class GangRounds:
    """Decides for all waiting pods of a gang until the ledger agrees."""

    def __init__(
        self, context: DecisionContext, writer: DecisionWriter, pod_rounds: PodRounds, clock: Clock
    ) -> None:
        self.context = context
        self.writer = writer
        self.pod_rounds = pod_rounds
        self.clock = clock

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
            leased = [lease for lease in enrollment.leases if lease.pod not in answered]
            answered.update(lease.pod for lease in leased)
            events += [PlacementChosen(lease=lease, trace=lease.trace) for lease in leased]
            members = {waiting.queued.pod: waiting.queued for waiting in enrollment.waiting}
            members |= {pod.pod: pod for pod in pods if pod.pod not in answered}
            if gang.min_member <= enrollment.live_count:
                await self.pod_rounds.place(list(members.values()), events)
                return
            spare = await self._round(gang, enrollment, members, events)
            if spare is not None:
                await self.pod_rounds.place(spare, events)
                return
            await self.clock.sleep(ROUND_PAUSE_S)
        raise ConflictError(f"gang {gang.name} found the ledger changed {ROUNDS} times")

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
            return await self._reserve(gang, pods, decision, events)
        refusal = gang_does_not_fit(
            gang, live=live, fitting=decision.fitting, refusal=decision.refusal
        )
        recipients = choose_offer_recipients(pods)
        return await self._refuse(
            pods, enrollment, refusal, events, capacity=capacity, recipients=recipients
        )

    async def _reserve(
        self,
        gang: Gang,
        pods: Sequence[PodQueued],
        decision: GangDecision,
        events: list[PlacementEvent],
    ) -> list[PodQueued] | None:
        decisions = RoundDecisions(chosen=decision.chosen)
        undecided = await self.writer.reserve(decisions, events, gang)
        if decisions.deferred:
            return None if await self.writer.defer(decisions.deferred) else []
        if undecided:
            return None
        chosen = {pod.pod for pod, _ in decision.chosen}
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
        changed = changed_verdicts(pods, enrollment, refusal, recipients)
        result = await self.writer.write_refusals(
            [(pod, refusal) for pod in changed], capacity, events, recipients, min_members
        )
        return None if result.stale or result.already_leased else []
