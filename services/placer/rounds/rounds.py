"""Rounds: decide, reserve, and repeat where the ledger disagreed; of a gang, enough at once."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from msgspec import structs

from services.placer.metrics import count
from services.placer.rounds.decisions import (
    DecisionContext,
    RefusedPod,
    RoundDecisions,
    decide,
)
from services.placer.rounds.gang_decisions import (
    changed_verdicts,
    choose_beside,
    choose_offer_recipients,
    decide_gang,
    strictest,
)
from services.placer.rounds.gang_domains import topology_of, values_on
from services.placer.rounds.refusal_texts import (
    DEFERRED,
    GANG_NOT_DECIDED,
    gang_does_not_fit,
    gang_too_small,
    member_refused,
    too_large_refusal,
    with_different_minimums,
)
from services.placer.rounds.refused_by_rules import RefusedByRules
from shared.ledger.leases import RedisLeases
from shared.model.clock import Clock
from shared.model.errors import ConflictError
from shared.model.events.pod_events import (
    PlacementChosen,
    PlacementRefused,
    PodQueued,
    message_digest,
)
from shared.model.leases.lease import Lease, LeaseState
from shared.model.leases.ledger import (
    RESERVED_FOR_OTHER,
    AlreadyLeased,
    GangEnrollment,
    GangIncomplete,
    GonePod,
    NoCapacity,
    Reservation,
    ReservationOutcome,
    ReservedLease,
    TooLarge,
    WaitingPod,
    WaitResult,
    reservation_for,
)
from shared.model.names import NodeName, PodUid
from shared.model.requests.placement import Placement, Refusal
from shared.model.requests.request import Gang, Within
from shared.placing.index.threshold_column import store
from shared.placing.node_filters import reaches
from shared.runtime import telemetry
from shared.runtime.span_attributes import NAMESPACE, POD_NAME, POD_UID
from shared.runtime.telemetry import Tracing

CACHED_REASONS = 65_536
SECOND_COPY_S = 0.5
"""Two watchers send each pod within this time of each other."""

PlacementEvent = PlacementChosen | PlacementRefused
ROUNDS = 10
"""Then events go back to the queue."""
ROUND_PAUSE_S = 0.005
"""Pause for the feed to deliver changes to the mirror."""


@contextmanager
def reservation_spans(
    tracing: Tracing, wanted: Sequence[Reservation], gang: Gang | None = None
) -> Iterator[tuple[list[Reservation], list[ReservationOutcome]]]:
    """Reserve within spans named `reserve devices`, one for each pod that has a trace.

    Yields what is to be reserved, so that spans of a lease become children of its reservation's,
    and the list of outcomes, to be filled.
    """
    links = tracing.links_between([pod.pod for pod in wanted]) if gang is not None else {}
    spans = [
        tracing.span(
            "reserve devices",
            reservation.trace,
            _attributes(reservation),
            links.get(reservation.pod, ()),
        )
        for reservation in wanted
    ]
    outcomes: list[ReservationOutcome] = []
    try:
        yield (
            [
                reservation
                if span is None
                else structs.replace(reservation, trace=telemetry.context_of(span))
                for reservation, span in zip(wanted, spans, strict=True)
            ],
            outcomes,
        )
    finally:
        for number, span in enumerate(spans):
            if span is not None:
                reserved = outcomes and isinstance(outcomes[number], ReservedLease)
                span.set_attribute("leasehold.outcome", "reserved" if reserved else "not reserved")
                telemetry.end([span])


def _attributes(wanted: Reservation) -> dict[str, str]:
    return {
        POD_UID: wanted.pod,
        POD_NAME: wanted.name,
        NAMESPACE: wanted.namespace,
        "db.system.name": "redis",
        "db.operation.name": "FCALL",
    }


@dataclass(eq=False)
class Rounds:
    """Until the ledger agrees, pods are decided on one by one and gangs as one."""

    ledger: RedisLeases
    clock: Clock
    context: DecisionContext
    ttl_s: float
    tracing: Tracing | None = None
    read_changes: Callable[[], None] = lambda: None
    """Called before another round, to let the mirror follow the ledger."""

    def __post_init__(self) -> None:
        self.mirror = self.context.mirror
        self.quotas = self.context.quotas
        self.events: list[PlacementEvent] = []
        self.refused_by_rules = RefusedByRules(self.context.index.pod_counts)
        self._reasons: dict[PodUid, str] = {}
        """The reason that this replica last published for each waiting pod."""
        self._decided_at = 0
        """Where the mirror's changes ended before the last decisions."""
        self._unpublished: set[PodUid] = set()
        """Pods whose handler failed: they may have leases that were not published."""

    def begin(self) -> None:
        self.events = []
        self.mirror.drop_counted()
        self.quotas.clear()

    def forget_published(self, pods: Collection[PodUid]) -> None:
        """Publish the next outcome for these pods in any case: their handler has failed."""
        for pod in pods:
            self._reasons.pop(pod, None)
        if len(self._unpublished) >= CACHED_REASONS:
            self._unpublished.clear()
        self._unpublished.update(pods)

    async def _reserve(
        self, decisions: RoundDecisions, gang: Gang | None, *, live: int | None = None
    ) -> list[PodQueued]:
        """Return the pods without a lease.

        Of a `gang`, all are reserved or none, beside the `live` ones; without `live`, each one,
        while enough of the gang have leases.
        """
        capacity = self.mirror.capacity
        outcomes = await self._request(decisions, gang, live)
        undecided: list[PodQueued] = []
        for (pod, candidates), outcome in zip(decisions.chosen, outcomes, strict=True):
            if not isinstance(outcome, ReservedLease):
                self.mirror.drop(pod.pod)
            match outcome:
                case ReservedLease(lease=lease):
                    self._apply_lease(decisions, pod, lease, candidates)
                case AlreadyLeased(lease=lease):
                    decisions.ledger_disagreed = True
                    count("already_leased")
                    self._repeat_leases([lease], [pod])
                case NoCapacity():
                    self._apply_no_capacity(decisions, pod, outcome, candidates, capacity)
                    if not outcome.reserved_for_other:
                        undecided.append(pod)
                case GangIncomplete():
                    count("gang_incomplete")
                    undecided.append(pod)
                case TooLarge(reason=reason):
                    count("too_large")
                    decisions.refused.append((pod, too_large_refusal(reason)))
                case GonePod():
                    decisions.ledger_disagreed = True
                    decisions.gone.append(pod)
                    self._drop_gone([pod.pod])
        return undecided

    async def _request(
        self, decisions: RoundDecisions, gang: Gang | None, live: int | None
    ) -> list[ReservationOutcome]:
        # Nothing was awaited since the decisions: they were made by this version.
        wanted = [
            reservation_for(
                self._near_volumes(pod, candidates), candidates, read_version=self.mirror.version
            )
            for pod, candidates in decisions.chosen
        ]
        try:
            if self.tracing is None:
                return await self._send(wanted, gang, live)
            with reservation_spans(self.tracing, wanted, gang) as (traced, outcomes):
                outcomes.extend(await self._send(traced, gang, live))
                return outcomes
        except BaseException:
            for pod, _ in decisions.chosen:
                self.mirror.drop(pod.pod)
            raise

    def _near_volumes(self, pod: PodQueued, candidates: Iterable[Placement]) -> PodQueued:
        """Leave out the volumes that none of the candidates reaches: there may be a thousand."""
        if not any(claim.volumes for claim in pod.request.claims):
            return pod
        nodes = [self.mirror.nodes[candidate.node].facts for candidate in candidates]
        claims = [
            structs.replace(
                claim,
                volumes=tuple(
                    volume
                    for volume in claim.volumes
                    if any(reaches(node, volume.terms) for node in nodes)
                ),
            )
            for claim in pod.request.claims
        ]
        return replace(pod, request=structs.replace(pod.request, claims=tuple(claims)))

    async def _send(
        self, wanted: Sequence[Reservation], gang: Gang | None, live: int | None
    ) -> list[ReservationOutcome]:
        now = self.clock.now()
        ttl_s = self.ttl_s
        if gang is None:
            return await self.ledger.reserve(wanted, now=now, ttl_s=ttl_s)
        if live is not None:
            exactly = live if gang.has_topology else -1
            return await self.ledger.reserve_gang(gang, wanted, now=now, ttl_s=ttl_s, live=exactly)
        return await self.ledger.reserve_further(gang, wanted, now=now, ttl_s=ttl_s)

    async def _write_refusals(
        self,
        refused: Sequence[RefusedPod],
        capacity: int,
        recipients: Collection[PodUid] | None = None,
        min_members: int = 0,
    ) -> WaitResult:
        """Store refused pods as waiting, unless capacity freed since may help them.

        Freed capacity is offered to the `recipients`, all by default. With `min_members`, pods are
        not stored if that many of their gang exist by now.
        """
        if not refused:
            return WaitResult()
        for pod, _ in refused:
            self.refused_by_rules.add(pod, self._decided_at)
        result = await self.ledger.waiting_pods.enqueue(
            [
                self._waiting(
                    pod,
                    refusal,
                    self.quotas.decided_at(pod, capacity),
                    receives_offers=recipients is None or pod.pod in recipients,
                    min_members=min_members,
                )
                for pod, refusal in refused
            ]
        )
        self.quotas.forget(pod for pod, _ in refused if pod.pod in result.stale)
        self._drop_gone(result.gone)
        stale = set(result.stale)
        leases = {lease.pod: lease for lease in result.already_leased}
        dropped = stale | set(result.gone)
        changed = set(result.changed)
        count("stale", len(stale))
        count("already_leased", len(leases))
        count("refused", len(refused) - len(dropped) - len(leases))
        for pod, refusal in refused:
            if pod.pod in leases:
                self._repeat_leases([leases[pod.pod]], [pod])
            elif pod.pod not in dropped and (
                pod.pod in changed or not self._is_published(pod, refusal)
            ):
                self._publish_refusal(pod, refusal)
        return result

    def _waiting(
        self,
        pod: PodQueued,
        refusal: Refusal,
        capacity: int,
        *,
        receives_offers: bool = True,
        min_members: int = 0,
    ) -> WaitingPod:
        return WaitingPod(
            queued=pod,
            refusal=refusal,
            capacity=capacity,
            waiting_since=self.clock.now(),
            receives_offers=receives_offers,
            min_members=min_members,
        )

    async def _defer(self, deferred: Sequence[PodQueued]) -> list[PodQueued]:
        """Store pods as waiting until their capacity has been offered to others; return stale ones.

        No event is published: this takes a moment, and ends with a placement or a verdict.
        """
        if not deferred:
            return []
        result = await self.ledger.waiting_pods.enqueue(
            [self._waiting(pod, DEFERRED, RESERVED_FOR_OTHER) for pod in deferred]
        )
        self._drop_gone(result.gone)
        ready = {*result.stale, *(lease.pod for lease in result.already_leased)}
        return [pod for pod in deferred if pod.pod in ready]

    def _drop_gone(self, pods: Collection[PodUid]) -> None:
        count("gone", len(pods))
        for pod in pods:
            self._reasons.pop(pod, None)
            self.refused_by_rules.discard(pod)

    def _apply_lease(
        self,
        decisions: RoundDecisions,
        pod: PodQueued,
        lease: Lease,
        candidates: Sequence[Placement],
    ) -> None:
        self.mirror.confirm(lease)
        first = lease.node == candidates[0].node
        if not first:
            decisions.ledger_disagreed = True
            self._note_contention(candidates[:1])
        count("reserved" if first else "reserved_other")
        self._publish_lease(lease, pod.trace)

    def _apply_no_capacity(
        self,
        decisions: RoundDecisions,
        pod: PodQueued,
        outcome: NoCapacity,
        candidates: Sequence[Placement],
        capacity: int,
    ) -> None:
        self.mirror.update_uses(outcome.devices, outcome.nodes)
        self.quotas.add(pod, outcome.quotas, capacity)
        decisions.ledger_disagreed = True
        count("deferred" if outcome.reserved_for_other else "no_capacity")
        if outcome.reserved_for_other:
            decisions.deferred.append(pod)
        if not outcome.quotas:
            self._note_contention(candidates)

    def _note_contention(self, taken: Sequence[Placement]) -> None:
        self.context.candidates.note_contention()
        for candidate in taken:
            self.mirror.note_contention(candidate.node)

    def _repeat_leases(self, leases: Iterable[Lease], pods: Iterable[PodQueued]) -> None:
        """Until their nodes have activated them, leases are published again.

        A placer has just published the lease for the second copy of a pod's first event, or the
        events of other `pods` of its gang.
        """
        queued = {pod.pod: pod for pod in pods}
        for lease in leases:
            pod = queued.get(lease.pod)
            is_young = self.clock.now() - lease.created_at < SECOND_COPY_S
            is_first = pod is None or pod.requeue_number == 0
            is_copy = is_first and is_young and lease.pod not in self._unpublished
            if lease.state is not LeaseState.ACTIVE and not is_copy:
                self._publish_lease(lease, pod.trace if pod else lease.trace)

    def _is_published(self, event: PodQueued, refusal: Refusal) -> bool:
        """Return whether this is the reason last published, and the one that a resync found."""
        is_resync = event.requeue_number < 0
        is_shown = not is_resync or event.shown == message_digest(refusal.text)
        return is_shown and self._reasons.get(event.pod) == refusal.reason

    def _publish_refusal(self, pod: PodQueued, refusal: Refusal) -> None:
        self._reasons.pop(pod.pod, None)
        store(self._reasons, pod.pod, refusal.reason, CACHED_REASONS)
        self.events.append(
            PlacementRefused(
                pod=pod.pod,
                namespace=pod.namespace,
                name=pod.name,
                refusal=refusal,
                trace=pod.trace,
            )
        )

    def _publish_lease(self, lease: Lease, trace: str) -> None:
        self._reasons.pop(lease.pod, None)
        self.refused_by_rules.discard(lease.pod)
        self._unpublished.discard(lease.pod)
        self.events.append(PlacementChosen(lease=lease, trace=trace))

    async def place(
        self, undecided: Sequence[PodQueued], gang: Gang | None = None, joined: Within = ()
    ) -> None:
        """Place pods, or further ones of a `gang` that runs, and add their events.

        `joined` has the values of the gang's labels on the nodes of its other pods. Raises
        ConflictError after too many rounds, and if the gang has ended meanwhile.
        """
        for _ in range(ROUNDS):
            undecided = await self._round(undecided, gang, joined)
            if not undecided:
                return
            await self._pause()
        raise ConflictError(
            f"{len(undecided)} pods are undecided: the ledger changed {ROUNDS} times"
        )

    async def _pause(self) -> None:
        self.read_changes()
        await self.clock.sleep(ROUND_PAUSE_S)

    async def _round(
        self, pods: Sequence[PodQueued], gang: Gang | None, joined: Within
    ) -> list[PodQueued]:
        """Decide once for all; return those that need another round."""
        capacity = self.mirror.capacity
        self._decided_at = self.mirror.changes.end
        choose = partial(choose_beside, context=self.context, joined=joined) if joined else None
        decisions = decide(pods, self.context, choose)
        undecided = await self._reserve(decisions, gang) if decisions.chosen else []
        undecided += await self._defer(decisions.deferred)
        refused = decisions.refused
        if decisions.ledger_disagreed:
            return [*undecided, *(pod for pod, _ in refused)]
        result = await self._write_refusals(refused, capacity)
        return [*undecided, *(pod for pod, _ in refused if pod.pod in result.stale)]

    async def place_gang(self, gang: Gang, pods: Sequence[PodQueued]) -> None:
        """Place a gang of which some pods were just queued, and add events of all its pods.

        Pods beyond the gang's minimum are placed one by one once it runs. Raises ConflictError
        after too many rounds.
        """
        answered: set[PodUid] = set()
        for _ in range(ROUNDS):
            enrollment = await self._enroll(gang, pods)
            self._drop_gone(enrollment.gone)
            pods = [pod for pod in pods if pod.pod not in enrollment.gone]
            leased = [lease for lease in enrollment.leases if lease.pod not in answered]
            answered.update(lease.pod for lease in leased)
            self._repeat_leases(leased, pods)
            members = {waiting.queued.pod: waiting.queued for waiting in enrollment.waiting}
            members |= {pod.pod: pod for pod in pods if pod.pod not in answered}
            joined = self._joined(members.values(), enrollment.nodes)
            whole = strictest(gang, members.values())
            if whole.min_member <= enrollment.live_count or not members:
                await self.place(list(members.values()), whole, joined)
                return
            if await self._gang_round(whole, enrollment, list(members.values()), joined):
                return
            await self._pause()
        raise ConflictError(f"gang {gang.name} is undecided: the ledger changed {ROUNDS} times")

    async def _enroll(self, gang: Gang, pods: Sequence[PodQueued]) -> GangEnrollment:
        return await self.ledger.waiting_pods.enroll(
            gang,
            [
                self._waiting(pod, GANG_NOT_DECIDED, self.mirror.capacity, receives_offers=False)
                for pod in pods
            ],
        )

    def _joined(self, pods: Iterable[PodQueued], nodes: Iterable[NodeName]) -> Within:
        topology = topology_of(pods)
        return values_on(nodes, (*topology.required, *topology.preferred), self.context.index)

    async def _gang_round(
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
        self._decided_at = self.mirror.changes.end
        decision = decide_gang(pods, gang.min_member - live, self.context, joined)
        if decision.refusal is None:
            decisions = RoundDecisions(chosen=decision.chosen)
            spare = await self._reserve_together(gang, pods, decisions, live)
            if not decisions.refused:
                if spare:
                    chosen_nodes = [candidates[0].node for _, candidates in decision.chosen]
                    joined = self._joined(spare, [*enrollment.nodes, *chosen_nodes])
                    await self.place(spare, gang, joined)
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
        undecided = await self._reserve(decisions, gang, live=live)
        if decisions.deferred:
            return None if await self._defer(decisions.deferred) else []
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
        unpublished = (pod.pod for pod in pods if not self._is_published(pod, refusal))
        changed = changed_verdicts(pods, enrollment, refusal, {*recipients, *unpublished})
        result = await self._write_refusals(
            [(pod, refusal) for pod in changed], capacity, recipients, min_members
        )
        return not (result.stale or result.already_leased or result.gone)
