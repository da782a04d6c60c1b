"""Rounds: decide, reserve, publish, and repeat where the ledger disagreed."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from msgspec import structs

from services.placer.metrics import count
from services.placer.rounds.decisions import DecisionContext, RefusedPod, RoundDecisions, decide
from services.placer.rounds.gang_decisions import choose_beside
from services.placer.rounds.refusal_texts import too_large_refusal
from services.placer.rounds.refused_pods import RefusedPods
from shared.ledger.leases import RedisLeases
from shared.model.clock import Clock
from shared.model.errors import ConflictError
from shared.model.events.pod_events import PlacementChosen, PlacementRefused, PodQueued
from shared.model.leases.lease import Lease, LeaseState
from shared.model.leases.ledger import (
    AlreadyLeased,
    GangIncomplete,
    GonePod,
    NoCapacity,
    Reservation,
    ReservationOutcome,
    ReservedLease,
    TooLarge,
    WaitResult,
    reservation_for,
)
from shared.model.names import PodUid
from shared.model.requests.placement import Placement
from shared.model.requests.request import Gang, Within
from shared.placing.node_filters import reaches
from shared.runtime import telemetry
from shared.runtime.span_attributes import NAMESPACE, POD_NAME, POD_UID
from shared.runtime.telemetry import Tracing

MOST_UNPUBLISHED = 65_536
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
    """Until the ledger agrees, pods are decided on one by one."""

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
        self.refused = RefusedPods(self.ledger, self.clock, self.context)
        self._unpublished: set[PodUid] = set()
        """Pods whose handler failed: they may have leases that were not published."""

    def begin(self) -> None:
        self.events = []
        self.mirror.drop_counted()
        self.quotas.clear()

    def forget_published(self, pods: Collection[PodUid]) -> None:
        """Publish the next outcome for these pods in any case: their handler has failed."""
        self.refused.forget_published(pods)
        if len(self._unpublished) >= MOST_UNPUBLISHED:
            self._unpublished.clear()
        self._unpublished.update(pods)

    async def reserve(
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
                    self.repeat_leases([lease], [pod])
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
                    self.refused.drop_gone([pod.pod])
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

    def repeat_leases(self, leases: Iterable[Lease], pods: Iterable[PodQueued]) -> None:
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

    def _publish_lease(self, lease: Lease, trace: str) -> None:
        self.refused.forget(lease.pod)
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
            await self.pause()
        raise ConflictError(
            f"{len(undecided)} pods are undecided: the ledger changed {ROUNDS} times"
        )

    async def pause(self) -> None:
        self.read_changes()
        await self.clock.sleep(ROUND_PAUSE_S)

    async def _round(
        self, pods: Sequence[PodQueued], gang: Gang | None, joined: Within
    ) -> list[PodQueued]:
        """Decide once for all; return those that need another round."""
        capacity = self.mirror.capacity
        self.refused.decided_at = self.mirror.changes.end
        choose = partial(choose_beside, context=self.context, joined=joined) if joined else None
        decisions = decide(pods, self.context, choose)
        undecided = await self.reserve(decisions, gang) if decisions.chosen else []
        undecided += await self.refused.defer(decisions.deferred)
        refused = decisions.refused
        if decisions.ledger_disagreed:
            return [*undecided, *(pod for pod, _ in refused)]
        result = await self.write_refusals(refused, capacity)
        return [*undecided, *(pod for pod, _ in refused if pod.pod in result.stale)]

    async def write_refusals(
        self,
        refused: Sequence[RefusedPod],
        capacity: int,
        recipients: Collection[PodUid] | None = None,
        min_members: int = 0,
    ) -> WaitResult:
        """As `RefusedPods.write`, with the events added."""
        result, events = await self.refused.write(refused, capacity, recipients, min_members)
        self.events += events
        self.repeat_leases(result.already_leased, [pod for pod, _ in refused])
        return result
