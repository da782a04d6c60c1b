"""Rounds for gangs: enough pods of one are reserved together, or none."""

from collections.abc import Collection, Iterable, Sequence

from services.placer.rounds.decisions import RoundDecisions
from services.placer.rounds.gang_decisions import (
    changed_verdicts,
    choose_offer_recipients,
    decide_gang,
    strictest,
)
from services.placer.rounds.gang_domains import topology_of, values_on
from services.placer.rounds.refusal_texts import (
    GANG_NOT_DECIDED,
    gang_does_not_fit,
    gang_too_small,
    member_refused,
    with_different_minimums,
)
from services.placer.rounds.rounds import ROUNDS, Rounds
from shared.model.errors import ConflictError
from shared.model.events.pod_events import PodQueued
from shared.model.leases.ledger import GangEnrollment
from shared.model.names import NodeName, PodUid
from shared.model.requests.placement import Refusal
from shared.model.requests.request import Gang, Within


class GangRounds:
    """Until the ledger agrees, gangs are decided on as one."""

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds
        self.refused = rounds.refused
        self.ledger = rounds.ledger
        self.mirror = rounds.mirror
        self.context = rounds.context

    async def place(self, gang: Gang, pods: Sequence[PodQueued]) -> None:
        """Place a gang of which some pods were just queued, and add events of all its pods.

        Pods beyond the gang's minimum are placed one by one once it runs. Raises ConflictError
        after too many rounds.
        """
        answered: set[PodUid] = set()
        for _ in range(ROUNDS):
            enrollment = await self._enroll(gang, pods)
            self.refused.drop_gone(enrollment.gone)
            pods = [pod for pod in pods if pod.pod not in enrollment.gone]
            leased = [lease for lease in enrollment.leases if lease.pod not in answered]
            answered.update(lease.pod for lease in leased)
            self.rounds.repeat_leases(leased, pods)
            members = {waiting.queued.pod: waiting.queued for waiting in enrollment.waiting}
            members |= {pod.pod: pod for pod in pods if pod.pod not in answered}
            joined = self._joined(members.values(), enrollment.nodes)
            whole = strictest(gang, members.values())
            if whole.min_member <= enrollment.live_count or not members:
                await self.rounds.place(list(members.values()), whole, joined)
                return
            if await self._round(whole, enrollment, list(members.values()), joined):
                return
            await self.rounds.pause()
        raise ConflictError(f"gang {gang.name} is undecided: the ledger changed {ROUNDS} times")

    async def _enroll(self, gang: Gang, pods: Sequence[PodQueued]) -> GangEnrollment:
        return await self.ledger.waiting_pods.enroll(
            gang,
            [
                self.refused.waiting(
                    pod, GANG_NOT_DECIDED, self.mirror.capacity, receives_offers=False
                )
                for pod in pods
            ],
        )

    def _joined(self, pods: Iterable[PodQueued], nodes: Iterable[NodeName]) -> Within:
        topology = topology_of(pods)
        return values_on(nodes, (*topology.required, *topology.preferred), self.context.index)

    async def _round(
        self, gang: Gang, enrollment: GangEnrollment, pods: Sequence[PodQueued], joined: Within
    ) -> bool:
        """Decide once, and place the pods that the gang can run without.

        Return False if another round is needed.
        """
        capacity = self.mirror.capacity
        live = enrollment.live_count
        waiting = enrollment.waiting_count
        if live + waiting < gang.min_member:
            refusal = with_different_minimums(
                gang_too_small(gang, live=live, waiting=waiting), pods
            )
            return await self._refuse(
                pods, enrollment, refusal, capacity=capacity, min_members=gang.min_member
            )
        self.refused.decided_at = self.mirror.changes.end
        decision = decide_gang(pods, gang.min_member - live, self.context, joined)
        if decision.refusal is None:
            decisions = RoundDecisions(chosen=decision.chosen)
            spare = await self._reserve_together(gang, pods, decisions, live)
            if not decisions.refused:
                if spare:
                    chosen_nodes = [candidates[0].node for _, candidates in decision.chosen]
                    joined = self._joined(spare, [*enrollment.nodes, *chosen_nodes])
                    await self.rounds.place(spare, gang, joined)
                return spare is not None
            refusal = member_refused(gang, *decisions.refused[0])
            return await self._refuse(pods, enrollment, refusal, capacity=capacity)
        refusal = gang_does_not_fit(gang, live=live, decision=decision, refusal=decision.refusal)
        refusal = with_different_minimums(refusal, pods)
        recipients = choose_offer_recipients(pods)
        return await self._refuse(
            pods, enrollment, refusal, capacity=capacity, recipients=recipients
        )

    async def _reserve_together(
        self, gang: Gang, pods: Sequence[PodQueued], decisions: RoundDecisions, live: int
    ) -> list[PodQueued] | None:
        undecided = await self.rounds.reserve(decisions, gang, live=live)
        if decisions.deferred:
            return None if await self.refused.defer(decisions.deferred) else []
        if undecided or decisions.gone:
            return None
        chosen = {pod.pod for pod, _ in decisions.chosen}
        return [pod for pod in pods if pod.pod not in chosen]

    async def _refuse(
        self,
        pods: Sequence[PodQueued],
        enrollment: GangEnrollment,
        refusal: Refusal,
        *,
        capacity: int,
        recipients: Collection[PodUid] = (),
        min_members: int = 0,
    ) -> bool:
        unpublished = (pod.pod for pod in pods if not self.refused.is_published(pod, refusal))
        changed = changed_verdicts(pods, enrollment, refusal, {*recipients, *unpublished})
        result = await self.rounds.write_refusals(
            [(pod, refusal) for pod in changed], capacity, recipients, min_members
        )
        return not (result.stale or result.already_leased or result.gone)
