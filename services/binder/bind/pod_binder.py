"""Binds batches of placed pods: admission by the node agents, commit, Binding, result."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import structs

from services.binder.bind.agent_presence import AgentPresence, Deferral
from services.binder.bind.binding_sender import BindingOutcome, BindingResult, BindingSender
from services.binder.bind.volume_binder import VolumeBinder
from services.binder.ledger_sync.agent_reports import release_as_read
from services.binder.ledger_sync.lease_holders import LeaseHolders
from services.binder.ledger_sync.ledger_updates import GANG_ENDED, LedgerUpdater, binding_failed
from services.binder.report.event_writer import ConditionWriter, EventRecorder
from services.binder.report.explanations import bound_event, event_of, explain_deferred
from shared.ledger.leases import RedisLeases
from shared.model.clock import Clock
from shared.model.errors import UnavailableError
from shared.model.events.pod_events import (
    BindingFailed,
    LeaseChanged,
    PlacementChosen,
    PodBound,
    PodTerminated,
    lease_changes,
)
from shared.model.leases.lease import Lease, LeaseState
from shared.model.names import PodUid
from shared.pods.pod_snapshot import PodSnapshot
from shared.runtime.service import Publish, handles

GIVE_UP_AGE_S = 2.0
"""A reservation that its node does not admit is released at this age at the earliest: by then the
ledger has the reason, so that the pod is not placed there again at once."""
ADMITTED_S = 5.0
"""No Binding is sent this long after an agent admitted its pod: the agent remembers for 10 s that
it comes, and then admits another one to the same GPU."""
UNSENT_S = 60.0
"""A committed lease of this age that its node's agent would refuse is released if its pod is not
bound: no earlier Binding can still arrive, as requests to the API server end after 10 s."""
CORDONED_S = 5.0
"""A reservation is released if its node has been cordoned for this long."""
EXPLAIN_S = 1.0
"""Age of a reservation at which the pod's condition explains why it is not bound."""
EXPLAIN_NEXT_S = 10.0
"""The same for a pod that is next in line: a burst must not cause a write per pod."""
ENDED = "the reservation ended before the pod was bound"
ADMITTED_LONG_AGO = "the agent of its node admitted it too long ago, and is requested again"
BindEvent = PodBound | BindingFailed | LeaseChanged
ADMISSION_WAIT_S = 1.0
"""If no pod of a batch is admitted for this time, its pods are redelivered later, and other batches
continue. A redelivery takes about as long."""
MAX_ADMISSION_WAIT_S = 5.0
"""A batch of which pods are still admitted is redelivered after this time: new batches wait."""
ADMISSION_RETRY_S = 0.02
"""A kubelet admits a pod within a few of these; the pause for a slower one doubles."""
MAX_ADMISSION_RETRY_S = 0.1
"""Pods of one GPU are admitted one after the other, and each waits for half of this pause."""


class CheckedGang(NamedTuple):
    gone: Sequence[PodTerminated]
    waits: bool


@dataclass(eq=False)
class GangCheck:
    """Ends the reservations of gangs that lose a pod before any of their pods is bound.

    The event of the deleted pod may not have arrived yet.
    """

    ledger: RedisLeases
    holders: LeaseHolders
    updater: LedgerUpdater
    volumes: VolumeBinder

    def __post_init__(self) -> None:
        self._checks: dict[str, asyncio.Task[CheckedGang]] = {}

    async def end_short(
        self, placements: Sequence[PlacementChosen]
    ) -> tuple[list[LeaseChanged | BindingFailed], Sequence[PlacementChosen]]:
        """Return events of ended leases, and the placements whose claims are bound.

        Raises UnavailableError while the API server does not respond.
        """
        gangs = sorted({placement.lease.gang for placement in placements if placement.lease.gang})
        if not gangs:
            return [], placements
        checks = await asyncio.gather(*map(self._check_once, gangs))
        gone = [event for check in checks for event in check.gone]
        events = await self.updater.end_terminated(gone) if gone else []
        waiting = {gang for gang, check in zip(gangs, checks, strict=True) if check.waits}
        return events, [chosen for chosen in placements if chosen.lease.gang not in waiting]

    async def _check_once(self, gang: str) -> CheckedGang:
        check = self._checks.get(gang)
        if check is None:
            check = self._checks[gang] = asyncio.create_task(self._check(gang))
            check.add_done_callback(lambda done: self._forget(gang, done))
        return await asyncio.shield(check)

    def _forget(self, gang: str, check: asyncio.Task[CheckedGang]) -> None:
        self._checks.pop(gang, None)
        if not check.cancelled():
            check.exception()  # nothing may wait for it any more

    async def _check(self, gang: str) -> CheckedGang:
        leases = await self.ledger.load_reserved_gang(gang)
        gone = await self.holders.read_gone(leases)
        has_claims = any(lease.claims for lease in leases)
        waits = has_claims and not gone and not await self.volumes.are_bound(leases)
        return CheckedGang(gone, waits)


@dataclass(eq=False, kw_only=True)
class PodBinder:
    ledger: RedisLeases
    publish: Publish
    sender: BindingSender
    presence: AgentPresence
    updater: LedgerUpdater
    gangs: GangCheck
    volumes: VolumeBinder
    conditions: ConditionWriter
    events: EventRecorder
    clock: Clock

    @handles(concurrency=16)
    async def bind_pods(self, placements: Sequence[PlacementChosen]) -> list[BindEvent]:
        """Bind what the node agents admit; retry deferred pods whose turn comes next.

        Raises UnavailableError after publishing the other results, so that the batch is delivered
        again.
        """
        unresolved: list[str] = []
        total = len(placements)
        if any(placement.lease.claims for placement in placements):
            settlement = await self.volumes.settle(placements)
            placements = settlement.ready
            unresolved += settlement.unresolved
        remaining = {placement.lease.pod: placement for placement in placements}
        began = self.clock.ticks()
        progressed = began
        pause_s = ADMISSION_RETRY_S
        while True:
            remaining, ended = await self._without_expired(remaining)
            leases = [placement.lease for placement in remaining.values()]
            asked_at = self.clock.ticks()
            deferrals = await self._as_committed(await self.presence.deferrals(leases), leases)
            admitted = [placement for pod, placement in remaining.items() if pod not in deferrals]
            results, reasons = await self._bind_admitted(admitted, asked_at)
            results += ended
            unresolved += reasons
            now = self.clock.ticks()
            if admitted:
                progressed = now
            deadline = min(progressed + ADMISSION_WAIT_S, began + MAX_ADMISSION_WAIT_S)
            if unresolved or not _any_soon(deferrals) or now > deadline:
                break
            await self.publish(results)
            pause_s = ADMISSION_RETRY_S if admitted else min(2 * pause_s, MAX_ADMISSION_RETRY_S)
            remaining = {pod: remaining[pod] for pod in deferrals}
            await self.clock.sleep(pause_s)
        settled, reasons = await self._settle_deferred(deferrals, remaining)
        results += settled
        unresolved += reasons
        if unresolved:
            await self.publish(results)
            raise UnavailableError(
                f"{len(unresolved)} of {total} bindings are not known yet: {unresolved[0]}"
            )
        return results

    async def _without_expired(
        self, placements: Mapping[PodUid, PlacementChosen]
    ) -> tuple[dict[PodUid, PlacementChosen], list[BindingFailed]]:
        """Leave out pods with expired reservations: agents would keep places for them."""
        now = self.clock.now()
        late = [pod for pod, chosen in placements.items() if 0 < chosen.lease.expires_at <= now]
        stored = dict(zip(late, await self.ledger.load(late), strict=True)) if late else {}
        expired = {
            pod: lease
            for pod, lease in stored.items()
            if lease is None or not _is_of(lease, placements[pod])
        }
        left = {pod: chosen for pod, chosen in placements.items() if pod not in expired}
        return left, _ended(placements[pod] for pod, lease in expired.items() if lease is None)

    async def _as_committed(
        self, deferrals: Mapping[PodUid, Deferral], leases: Iterable[Lease]
    ) -> Mapping[PodUid, Deferral]:
        """Defer the gangs of refused pods with them.

        A committed lease shows that the gang has begun: its pod waits alone, unless its Binding was
        sent.
        """
        refused = {pod for pod, deferral in deferrals.items() if deferral.refused}
        if not refused:
            return deferrals
        gangs = {lease.gang for lease in leases if lease.gang and lease.pod in refused}
        members = {lease.pod: lease.gang for lease in leases if lease.gang in gangs}
        stored = [lease for lease in await self.ledger.load([*refused | members.keys()]) if lease]
        reserved = {lease.pod for lease in stored if lease.state is LeaseState.RESERVED}
        reasons = {members[pod]: deferrals[pod] for pod in members.keys() & refused & reserved}
        together = {
            pod: reasons[gang]
            for pod, gang in members.items()
            if gang in reasons and pod in reserved
        }
        sent = {lease.pod for lease in stored if self.sender.has_sent(lease)}
        return {
            pod: deferral
            for pod, deferral in {**together, **deferrals}.items()
            if pod not in refused & sent
        }

    async def _bind_admitted(
        self, placements: Sequence[PlacementChosen], asked_at: float
    ) -> tuple[list[BindEvent], list[str]]:
        """Return the events, and why the outcome of some Bindings is unknown."""
        ended_gangs, placements = await self.gangs.end_short(placements)
        by_pod = {placement.lease.pod: placement for placement in placements}
        leases, ended = await self._commit(placements)
        ended_events = _ended(by_pod[pod] for pod in ended)
        if self.clock.ticks() - asked_at > ADMITTED_S:
            return [*ended_gangs, *ended_events], [ADMITTED_LONG_AGO for _ in leases]
        traces = [by_pod[lease.pod].trace or lease.trace for lease in leases]
        # What the node's agent does is below the binding in the pod's trace.
        below = [
            lease if trace == lease.trace else structs.replace(lease, trace=trace)
            for lease, trace in zip(leases, traces, strict=True)
        ]
        await self.publish([LeaseChanged(lease=lease) for lease in below])
        results = await self.sender.send(list(zip(leases, traces, strict=True)))
        events = [*ended_gangs, *await self._report(leases, traces, results)]
        events += ended_events
        unknown = [result.reason for result in results if result.outcome is BindingOutcome.UNKNOWN]
        return events, unknown

    async def _commit(
        self, placements: Sequence[PlacementChosen]
    ) -> tuple[list[Lease], list[PodUid]]:
        """Return committed leases, and the pods whose reservations have ended."""
        committed = await self.ledger.bind([placement.lease for placement in placements])
        leases = [outcome for outcome in committed if isinstance(outcome, Lease)]
        errors = [outcome for outcome in committed if not isinstance(outcome, Lease)]
        return leases, [error.pod for error in errors if not error.stored]

    async def _report(
        self, leases: Sequence[Lease], traces: Sequence[str], results: Sequence[BindingResult]
    ) -> list[BindEvent]:
        now = self.clock.now()
        events: list[BindEvent] = []
        failed: list[Lease] = []
        deleted: list[PodUid] = []
        for lease, trace, result in zip(leases, traces, results, strict=True):
            if result.outcome is BindingOutcome.BOUND:
                latency_s = max(0.0, now - lease.created_at)
                events.append(PodBound(lease=lease, latency_s=latency_s, trace=trace))
                self.conditions.forget(lease.pod)
                self.events.record(bound_event(lease), once=True)
            elif result.failed:
                if result.outcome is BindingOutcome.DELETED:
                    deleted.append(lease.pod)
                else:
                    failed.append(lease)
                events.append(binding_failed(lease, result.reason, trace))
                self.events.record(event_of(lease, "FailedBinding", result.reason))
        if deleted:
            # Their leases end once the agents of their nodes confirm that nothing of them runs.
            await self.ledger.waiting_pods.remove(deleted)
        if failed:
            events += lease_changes(
                await release_as_read(self.ledger, failed, reason="the binding failed")
            )
        return events

    async def _settle_deferred(
        self, deferrals: Mapping[PodUid, Deferral], placements: Mapping[PodUid, PlacementChosen]
    ) -> tuple[list[BindEvent], list[str]]:
        """Explain pods that wait; release reservations that their nodes do not admit.

        Return the events, and why some still wait. Raises ConflictError if a reservation moved on.
        """
        if not deferrals:
            return [], []
        stored = [lease for lease in await self.ledger.load(list(deferrals)) if lease is not None]
        deferred = [lease for lease in stored if _is_of(lease, placements[lease.pod])]
        given_up = [
            *await self._give_up(deferred, deferrals),
            *await self._give_up_unsent(deferred, deferrals),
        ]
        released = {lease.pod for lease in given_up}
        waiting = [lease for lease in deferred if lease.pod not in released]
        self._explain(waiting, deferrals)
        events: list[BindEvent] = [*lease_changes(given_up)]
        for lease in given_up:
            reason = deferrals[lease.pod].reason if lease.pod in deferrals else GANG_ENDED
            events.append(binding_failed(lease, reason, lease.trace))
        ended = sorted(deferrals.keys() - {lease.pod for lease in stored})
        events += _ended(placements[pod] for pod in ended)
        return events, [deferrals[lease.pod].reason for lease in waiting]

    async def _give_up(
        self, deferred: Iterable[Lease], deferrals: Mapping[PodUid, Deferral]
    ) -> list[Lease]:
        hopeless = [
            lease
            for lease in deferred
            if lease.state is LeaseState.RESERVED and self._is_hopeless(lease, deferrals[lease.pod])
        ]
        return await self.updater.release_unmoved(hopeless, reason="its node does not admit it")

    async def _give_up_unsent(
        self, deferred: Iterable[Lease], deferrals: Mapping[PodUid, Deferral]
    ) -> list[Lease]:
        """End committed leases of refused pods whose Bindings were certainly not sent."""
        latest = self.clock.now() - UNSENT_S
        refused = [
            lease
            for lease in deferred
            if lease.state is LeaseState.BOUND
            and deferrals[lease.pod].refused
            and lease.created_at < latest
        ]
        pods = await self.gangs.holders.read(refused)
        unbound = [
            lease
            for lease, pod in zip(refused, pods, strict=True)
            if isinstance(pod, PodSnapshot) and pod.pod == lease.pod and pod.node is None
        ]
        return await release_as_read(self.ledger, unbound, reason="its node does not admit it")

    def _is_hopeless(self, lease: Lease, deferral: Deferral) -> bool:
        if self.clock.now() - lease.created_at < GIVE_UP_AGE_S:
            return False
        return deferral.refused or deferral.cordoned_s >= CORDONED_S

    def _explain(self, leases: Iterable[Lease], deferrals: Mapping[PodUid, Deferral]) -> None:
        for lease in leases:
            deferral = deferrals[lease.pod]
            due_s = EXPLAIN_NEXT_S if deferral.retry_soon else EXPLAIN_S
            if self.clock.now() - lease.created_at >= due_s:
                explanation = explain_deferred(lease, deferral.reason)
                self.conditions.repeat(explanation, self.events)


def _is_of(lease: Lease, placement: PlacementChosen) -> bool:
    chosen = placement.lease
    return (lease.node, lease.created_at) == (chosen.node, chosen.created_at)


def _ended(placements: Iterable[PlacementChosen]) -> list[BindingFailed]:
    return [binding_failed(placement.lease, ENDED, placement.trace) for placement in placements]


def _any_soon(deferrals: Mapping[PodUid, Deferral]) -> bool:
    return any(deferral.retry_soon for deferral in deferrals.values())
