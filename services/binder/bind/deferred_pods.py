"""Deferred pods: explains why they are not bound yet, or releases them from a cordoned node."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from services.binder.bind.agent_presence import Deferral
from services.binder.ledger_sync.ledger_updates import LedgerUpdater
from services.binder.report.condition_writer import ConditionWriter
from services.binder.report.event_writer import EventRecorder
from services.binder.report.explanations import explain_deferred, waiting_event
from shared.ledger.leases import RedisLeases
from shared.model.clock import Clock
from shared.model.lease import Lease, LeaseState
from shared.model.names import NodeName, PodUid


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferralTiming:
    """When a deferred pod is explained, and when its reservation is released."""

    give_up_s: float = 5.0
    """A reservation on a node that has been cordoned for this long is released."""
    explain_s: float = 1.0
    """Age of a reservation at which the pod's condition explains why it is not bound."""
    explain_next_s: float = 10.0
    """The same for a pod that is next in line: a burst must not cause a write per pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferredOutcome:
    """Outcome for deferred pods."""

    waiting: tuple[Lease, ...] = ()
    given_up: tuple[Lease, ...] = ()
    ended: tuple[PodUid, ...] = ()
    """Pods whose reservation had ended before."""


class DeferredPods:
    """Only used while some node's agent does not reply."""

    def __init__(
        self,
        *,
        ledger: RedisLeases,
        updater: LedgerUpdater,
        conditions: ConditionWriter,
        events: EventRecorder,
        clock: Clock,
        timing: DeferralTiming | None = None,
    ) -> None:
        self.ledger = ledger
        self.updater = updater
        self.conditions = conditions
        self.events = events
        self.clock = clock
        self.timing = timing or DeferralTiming()

    async def settle(
        self, deferrals: Mapping[PodUid, Deferral], nodes: Mapping[PodUid, NodeName]
    ) -> DeferredOutcome:
        """Explain pods that wait for their nodes; release reservations on cordoned nodes.

        A committed lease stays: its Binding may have been sent. A pod whose lease is now on another
        node does not wait here. Raises ConflictError if a reservation moved on meanwhile.
        """
        if not deferrals:
            return DeferredOutcome()
        stored = [lease for lease in await self.ledger.load(list(deferrals)) if lease is not None]
        deferred = [lease for lease in stored if lease.node == nodes[lease.pod]]
        given_up = await self.updater.release_unmoved(
            [lease for lease in deferred if self._is_hopeless(lease, deferrals[lease.pod])],
            reason="its node was cordoned",
        )
        released = {lease.pod for lease in given_up}
        waiting = tuple(lease for lease in deferred if lease.pod not in released)
        self._explain(waiting, deferrals)
        ended = deferrals.keys() - {lease.pod for lease in stored}
        return DeferredOutcome(
            waiting=waiting, given_up=tuple(given_up), ended=tuple(sorted(ended))
        )

    def _is_hopeless(self, lease: Lease, deferral: Deferral) -> bool:
        cordoned_long = deferral.cordoned_s >= self.timing.give_up_s
        return lease.state is LeaseState.RESERVED and cordoned_long

    def _explain(self, leases: Iterable[Lease], deferrals: Mapping[PodUid, Deferral]) -> None:
        timing = self.timing
        for lease in leases:
            deferral = deferrals[lease.pod]
            due_s = timing.explain_next_s if deferral.retry_soon else timing.explain_s
            if self.clock.now() - lease.created_at >= due_s:
                explanation = explain_deferred(lease, deferral.reason)
                if self.conditions.repeat(explanation):
                    self.events.record(waiting_event(explanation))
