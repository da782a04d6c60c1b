"""Binds batches of placed pods: admission by the node agents, commit, Binding, result."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from services.binder.bind.agent_presence import AgentPresence, Deferral
from services.binder.bind.binding import BindingOutcome, BindingResult
from services.binder.bind.binding_sender import BindingSender
from services.binder.bind.deferred_pods import DeferredPods
from services.binder.bind.gang_check import GangCheck
from services.binder.ledger_sync.ledger_updates import (
    GANG_ENDED,
    binding_failed,
    lease_changes,
)
from services.binder.report.condition_writer import ConditionWriter
from services.binder.report.event_writer import EventRecorder
from services.binder.report.explanations import bound_event, lease_event
from shared.ledger.leases import RedisLeases
from shared.model.clock import Clock
from shared.model.errors import UnavailableError
from shared.model.events.pod_events import BindingFailed, LeaseChanged, PlacementChosen, PodBound
from shared.model.lease import Lease
from shared.model.names import PodUid
from shared.runtime.service import Publish

ENDED = "the reservation ended before the pod was bound"

BindEvent = PodBound | BindingFailed | LeaseChanged


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTiming:
    """How long a batch waits until node agents admit its pods."""

    wait_s: float = 1.0
    """After this time, the remaining pods are redelivered later, and other batches continue."""
    retry_s: float = 0.02
    """A kubelet admits a pod within a few of these; the pause for a slower one doubles."""
    max_retry_s: float = 0.3


class PodBinder:
    """Stateless between batches."""

    def __init__(
        self,
        *,
        ledger: RedisLeases,
        publish: Publish,
        sender: BindingSender,
        presence: AgentPresence,
        deferred: DeferredPods,
        gangs: GangCheck,
        conditions: ConditionWriter,
        events: EventRecorder,
        capacity_freed: Callable[[], None],
        clock: Clock,
        timing: BatchTiming | None = None,
    ) -> None:
        self.ledger = ledger
        self.publish = publish
        self.sender = sender
        self.presence = presence
        self.deferred = deferred
        self.gangs = gangs
        self.conditions = conditions
        self.events = events
        self.capacity_freed = capacity_freed
        self.clock = clock
        self.timing = timing or BatchTiming()

    async def bind(self, placements: Sequence[PlacementChosen]) -> list[BindEvent]:
        """Bind what the node agents admit; retry deferred pods whose turn comes next.

        Raises UnavailableError if the outcome of some pods is not known yet; what is known is
        published before that.
        """
        remaining = {placement.lease.pod: placement for placement in placements}
        unresolved: list[str] = []
        deadline, pause_s = self.clock.ticks() + self.timing.wait_s, self.timing.retry_s
        while True:
            leases = [placement.lease for placement in remaining.values()]
            deferrals = await self.presence.deferrals(leases)
            admitted = [each for pod, each in remaining.items() if pod not in deferrals]
            results, reasons = await self._bind_admitted(admitted)
            unresolved += reasons
            if not _any_soon(deferrals) or self.clock.ticks() > deadline:
                break
            await self.publish(results)
            pause_s = self.timing.retry_s if admitted else min(2 * pause_s, self.timing.max_retry_s)
            remaining = {pod: remaining[pod] for pod in deferrals}
            await self.clock.sleep(pause_s)
        settled, reasons = await self._settle_deferred(deferrals, remaining)
        results += settled
        unresolved += reasons
        if unresolved:
            await self.publish(results)
            raise UnavailableError(
                f"{len(unresolved)} of {len(placements)} bindings are not known yet: "
                f"{unresolved[0]}"
            )
        return results

    async def _bind_admitted(
        self, placements: Sequence[PlacementChosen]
    ) -> tuple[list[BindEvent], list[str]]:
        """Bind these pods; return the events, and why the outcome of some is not known.

        A lease that has moved on is dropped; one that has ended is a failed binding.
        """
        by_pod = {placement.lease.pod: placement for placement in placements}
        ended_gangs = await self.gangs.end_short(placements)
        if ended_gangs:
            self.capacity_freed()
        leases, ended = await self._commit(placements)
        await self.publish([LeaseChanged(lease=lease) for lease in leases])
        traces = [by_pod[lease.pod].trace or lease.trace for lease in leases]
        results = await self.sender.send(list(zip(leases, traces, strict=True)))
        events = [*ended_gangs, *await self._report(leases, traces, results)]
        events += [binding_failed(by_pod[pod].lease, ENDED, by_pod[pod].trace) for pod in ended]
        unknown = [each.reason for each in results if each.outcome is BindingOutcome.UNKNOWN]
        return events, unknown

    async def _commit(
        self, placements: Sequence[PlacementChosen]
    ) -> tuple[list[Lease], list[PodUid]]:
        """Commit reservations; return the leases, and the pods whose reservations have ended."""
        committed = await self.ledger.bind([placement.lease for placement in placements])
        leases = [each for each in committed if isinstance(each, Lease)]
        stale = [each for each in committed if not isinstance(each, Lease)]
        return leases, [error.pod for error in stale if not error.stored]

    async def _report(
        self, leases: Sequence[Lease], traces: Sequence[str], results: Sequence[BindingResult]
    ) -> list[BindEvent]:
        now = self.clock.now()
        events: list[BindEvent] = []
        failed: list[Lease] = []
        deleted: list[PodUid] = []
        for lease, trace, result in zip(leases, traces, results, strict=True):
            if result.outcome is BindingOutcome.BOUND:
                events.append(PodBound(lease=lease, latency_s=now - lease.created_at, trace=trace))
                self.conditions.forget(lease.pod)
                self.events.record(bound_event(lease), once=True)
            elif result.failed:
                if result.outcome is BindingOutcome.DELETED:
                    deleted.append(lease.pod)
                else:
                    failed.append(lease)
                events.append(binding_failed(lease, result.reason, trace))
                self.events.record(lease_event(lease, "FailedBinding", result.reason))
        if deleted:
            # Their leases end once the agents of their nodes confirm that nothing of them runs.
            await self.ledger.waiting_pods.remove(deleted)
        if failed:
            events += lease_changes(await self._release_unbound(failed))
            self.capacity_freed()
        return events

    async def _release_unbound(self, leases: Sequence[Lease]) -> list[Lease]:
        """End leases as they were bound: the pod may have been given another one meanwhile."""
        ended = await asyncio.gather(
            *(
                self.ledger.release([lease.pod], reason="the binding failed", version=lease.version)
                for lease in leases
            )
        )
        return [lease for batch in ended for lease in batch]

    async def _settle_deferred(
        self, deferrals: Mapping[PodUid, Deferral], placements: Mapping[PodUid, PlacementChosen]
    ) -> tuple[list[BindEvent], list[str]]:
        """Explain or give up deferred pods; return the events, and why some still wait."""
        nodes = {pod: placements[pod].lease.node for pod in deferrals}
        outcome = await self.deferred.settle(deferrals, nodes)
        if outcome.given_up:
            self.capacity_freed()
        events: list[BindEvent] = [*lease_changes(outcome.given_up)]
        for lease in outcome.given_up:
            deferral = deferrals.get(lease.pod)
            reason = deferral.reason if deferral else GANG_ENDED
            events.append(binding_failed(lease, reason, lease.trace))
        events += [
            binding_failed(placements[pod].lease, ENDED, placements[pod].trace)
            for pod in outcome.ended
        ]
        return events, [deferrals[lease.pod].reason for lease in outcome.waiting]


def _any_soon(deferrals: Mapping[PodUid, Deferral]) -> bool:
    return any(deferral.retry_soon for deferral in deferrals.values())
