"""The binder: binds placed pods, and keeps the ledger in sync with the cluster.

Handlers that one part needs alone are methods of that part; those here use several.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.binder.bind.agent_presence import AgentPresence, NodeCordons
from services.binder.bind.binding_sender import BindingSender
from services.binder.bind.pod_binder import PodBinder
from services.binder.bind.scheduler_bindings import SchedulerBindings
from services.binder.bind.volume_binder import VolumeBinder
from services.binder.ledger_sync.agent_reports import NodeRefusals
from services.binder.ledger_sync.evidence import CollectedEvidence
from services.binder.ledger_sync.ledger_updates import LedgerUpdater, VanishedPods
from services.binder.ledger_sync.library_removal import LibraryRemoval
from services.binder.ledger_sync.rebuild import LedgerRebuild
from services.binder.ledger_sync.reconciliation import Reconciler
from services.binder.ledger_sync.record_watch import RecordWatch
from services.binder.ledger_sync.scheduling_gates import SchedulingGates
from services.binder.ledger_sync.sweep import SchedulerOffers, Sweeper
from services.binder.plans.preemptions import PlannedPreemptions
from services.binder.plans.starts import PlannedStarts
from services.binder.report.event_writer import ConditionWriter, EventWriter
from services.binder.report.explanations import (
    config_event,
    explain,
    health_events,
    leftovers_event,
    rejected_event,
    share_event,
    violation_event,
)
from services.binder.resize.resizer import Resizer
from shared.model.events.node_events import (
    DeviceReported,
    DevicesRegistered,
    HealthChanged,
    ShareActivated,
    ShareRefused,
    ViolationFound,
    ViolationReason,
)
from shared.model.events.plan_events import ViolationConfirmed
from shared.model.events.pod_events import (
    BindingFailed,
    BudgetChanged,
    LeaseChanged,
    LeaseResized,
    PlacementChosen,
    PlacementRefused,
    PodQueued,
    PodRejected,
    PodTerminated,
    lease_changes,
)
from shared.model.events.request_reply import (
    BindRequest,
    LeasesReply,
    LeasesRequest,
    LimitsRequest,
    SlicesRequest,
    TerminationRequest,
)
from shared.runtime.service import Publish, answers, handles, loops, publishes

FORMING_S = 3.0
"""For this long, the other pods of a gang may still be being created, and be counted."""
GATHER_REPORTS_S = 0.1
"""Agents report one by one, and often: reports that share a call of the ledger cost much less."""


@publishes(
    BindRequest, LeaseResized, LimitsRequest, PlacementChosen, SlicesRequest, TerminationRequest
)
@dataclass(eq=False, kw_only=True)
class Binder:
    """Any number of replicas may run: only Bindings in flight are kept here."""

    publish: Publish
    pods: PodBinder
    sender: BindingSender
    volumes: VolumeBinder
    presence: AgentPresence
    cordons: NodeCordons
    offers: SchedulerOffers
    chosen: SchedulerBindings
    updater: LedgerUpdater
    vanished: VanishedPods
    sweeper: Sweeper
    reconciler: Reconciler
    evidence: CollectedEvidence
    rebuild: LedgerRebuild
    records: RecordWatch
    libraries: LibraryRemoval
    gates: SchedulingGates
    events: EventWriter
    conditions: ConditionWriter
    refusals: NodeRefusals
    preemptions: PlannedPreemptions
    starts: PlannedStarts
    resizer: Resizer

    # Reports

    @handles
    async def explain_waiting(self, events: Sequence[PlacementRefused | PodRejected]) -> None:
        for event in events:
            explanation = explain(event)
            if isinstance(event, PodRejected) and event.foreign:
                self.events.record(explanation, once=True)
            else:
                forming = isinstance(event, PlacementRefused) and event.refusal.forming
                after_s = FORMING_S if forming else 0.0
                self.conditions.explain(explanation, self.events, after_s=after_s)

    @handles
    async def report_violations(self, events: Sequence[ViolationFound]) -> list[ViolationConfirmed]:
        own = await self.refusals.own(events)
        for event in own:
            once = event.reason == ViolationReason.CORES_NOT_LIMITED
            self.events.record(violation_event(event), once=once)
        return [ViolationConfirmed.of(event) for event in own if not event.claim]

    @handles
    async def report_health(self, events: Sequence[HealthChanged]) -> None:
        for event in await self.refusals.with_own_holders(events):
            for health_event in health_events(event):
                self.events.record(health_event)

    # The ledger

    @handles(gather_s=GATHER_REPORTS_S)
    async def save_devices(self, events: Sequence[DeviceReported | DevicesRegistered]) -> None:
        refused = await self.updater.save_devices(events)
        self.refusals.refuse_all(refused)
        self.presence.record_reports([report for report in events if report.node not in refused])
        for event in events:
            if event.config_errors:
                self.events.record(config_event(event))
            for device in event.devices:
                if device.leftovers:
                    self.events.record(leftovers_event(event.node, device), once=True)

    @handles
    async def activate_shares(self, events: Sequence[ShareActivated]) -> None:
        self.refusals.refuse_all(await self.updater.activate(events))

    @handles
    async def release_refused(self, events: Sequence[ShareRefused]) -> list[LeaseChanged]:
        for event in await self.refusals.own(events):
            shown = share_event(event)
            if shown is not None:
                self.events.record(shown)
        return lease_changes(await self.updater.end_refused(events))

    @handles(concurrency=2)
    async def end_leases(
        self, events: Sequence[PodTerminated]
    ) -> list[LeaseChanged | BindingFailed]:
        for event in events:
            self.conditions.forget(event.pod)
            if (rejected := rejected_event(event)) is not None:
                self.events.record(rejected, once=True)
        await self.gates.remove(events)
        ended = await self.updater.end_terminated(events)
        self.preemptions.note_ended(event.pod for event in events)
        self.volumes.forsake(event.lease for event in ended if isinstance(event, LeaseChanged))
        return ended

    @answers(concurrency=8)
    async def list_leases(self, event: LeasesRequest) -> LeasesReply:
        return LeasesReply(leases=await self.updater.list_leases(event.node, event.pods))

    @loops(wait=lambda binder: binder.sweeper.wait())
    async def offer_capacity(self) -> list[PodQueued]:
        with self.sweeper.resync_on_failure():
            return await self.offers.make(await self.sweeper.offer())

    # Budgets

    @handles
    async def save_budgets(self, events: Sequence[BudgetChanged]) -> None:
        """Budgets that are not saved are published again."""
        with self.sweeper.resync_on_failure():
            for event in events:
                await self.preemptions.store.save_budget(event)
        self.gates.wake()
