"""The binder: binds placed pods, and keeps the ledger in sync with the cluster.

Any number of replicas may run. This module contains the handlers; the sub-packages do the work.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.binder.bind.agent_presence import AgentPresence, NodeCordons
from services.binder.bind.binding_sender import BindingSender
from services.binder.bind.pod_binder import PodBinder
from services.binder.bind.scheduler_bindings import SchedulerBindings
from services.binder.claims.claim_answers import ClaimEnder
from services.binder.claims.claim_leaser import ClaimLeaser
from services.binder.ledger_sync.agent_reports import NodeRefusals
from services.binder.ledger_sync.ledger_updates import LedgerUpdater, lease_changes
from services.binder.ledger_sync.rebuild import LedgerRebuild
from services.binder.ledger_sync.reconciliation import Reconciler
from services.binder.ledger_sync.scheduling_gates import SchedulingGates
from services.binder.ledger_sync.sweep import RecordWatch, SchedulerOffers, Sweeper
from services.binder.preempt.dry_run import dry_run
from services.binder.preempt.preemption_controller import PreemptionController
from services.binder.report.event_writer import ConditionWriter, EventWriter
from services.binder.report.explanations import (
    config_event,
    explain,
    health_events,
    rejected_event,
    share_event,
    violation_event,
)
from services.binder.resize.resizer import FINISH_S, Resizer
from shared.model.events.claim_events import ClaimAllocated, ClaimDeallocated
from shared.model.events.node_events import (
    DeviceReported,
    HealthChanged,
    ShareActivated,
    ShareRefused,
    ViolationFound,
    ViolationReason,
)
from shared.model.events.pod_events import (
    BindingFailed,
    BudgetChanged,
    LeaseChanged,
    LeaseResized,
    LedgerRebuilt,
    NodeChanged,
    NodesListed,
    PlacementChosen,
    PlacementRefused,
    PodBound,
    PodFilteredOut,
    PodGated,
    PodQueued,
    PodRejected,
    PodsListed,
    PodTerminated,
    QuotasUpdated,
    ResyncRequested,
)
from shared.model.events.request_reply import (
    BindRequest,
    ClaimLeaseReply,
    ClaimLeaseRequest,
    DryRunReply,
    DryRunRequest,
    LeasesReply,
    LeasesRequest,
    LimitsRequest,
    PodBindingReply,
    PodBindingRequest,
    ResizeReply,
    ResizeRequest,
    SlicesRequest,
    TerminationRequest,
)
from shared.runtime.service import Publish, answers, handles, loops, publishes

STEP_S = 1.0
GATHER_REPORTS_S = 0.1
"""Agents report one by one, and often: reports that share a script call cost much less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bindings:
    """The packages `bind` and `claims`."""

    pods: PodBinder
    chosen: SchedulerBindings
    offers: SchedulerOffers
    sender: BindingSender
    presence: AgentPresence
    cordons: NodeCordons
    claim_leaser: ClaimLeaser
    claim_ender: ClaimEnder


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSync:
    """The package `ledger_sync`."""

    updater: LedgerUpdater
    sweeper: Sweeper
    reconciler: Reconciler
    rebuild: LedgerRebuild
    records: RecordWatch
    gates: SchedulingGates


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """The package `report`."""

    events: EventWriter
    conditions: ConditionWriter
    refusals: NodeRefusals


@publishes(BindRequest, LeaseResized, LimitsRequest, SlicesRequest, TerminationRequest)
@dataclass(eq=False, kw_only=True)
class Binder:
    """Stateless except for Bindings in flight; the ledger and the API server store the state."""

    publish: Publish
    binding: Bindings
    sync: LedgerSync
    reports: Reports
    preemptor: PreemptionController
    resizer: Resizer

    # Bindings

    @handles(concurrency=16)
    async def bind_pods(
        self, events: Sequence[PlacementChosen]
    ) -> list[PodBound | BindingFailed | LeaseChanged]:
        """Commit the leases, publish them to their nodes, bind the pods; release what failed.

        A lease that moved on is dropped: no event is published for it. A lease that has ended is a
        failed binding, and its pod is queued again if it still waits. A node's pods are bound in
        turn, as its agent admits them, for `ADMISSION_WAIT_S` seconds. The batch is redelivered
        after a pause if some outcome is unknown, or some node's agent is away or defers pods; what
        is known by then is published at once.
        """
        return await self.binding.pods.bind(events)

    @handles(concurrency=4)
    async def lease_claims(self, events: Sequence[ClaimAllocated]) -> list[LeaseChanged]:
        """Lease what schedulers have allocated to ResourceClaims, and answer in their status."""
        return await self.binding.claim_leaser.lease(events)

    @answers(concurrency=32)
    async def lease_claim(self, event: ClaimLeaseRequest) -> ClaimLeaseReply:
        """Lease an allocation that a scheduler is writing now."""
        return await self.binding.claim_leaser.admit(event)

    @loops(every_s=STEP_S)
    async def end_unwritten_claims(self) -> list[LeaseChanged]:
        """End leases whose allocations were not written after all."""
        return await self.binding.claim_leaser.end_unwritten()

    @handles
    async def end_claims(self, events: Sequence[ClaimDeallocated]) -> list[LeaseChanged]:
        """End the leases of claims that lost their allocation, unless they may be prepared."""
        return await self.binding.claim_ender.end_deallocated(events)

    @loops
    async def send_bindings(self) -> None:
        """Send Bindings, a fixed number in parallel."""
        await self.binding.sender.run()

    @answers(concurrency=32)
    async def bind_chosen(self, event: PodBindingRequest) -> PodBindingReply:
        """Lease shares for a pod on the node that kube-scheduler chose, and bind it there."""
        return await self.binding.chosen.bind(event, self.preemptor.claimed_for)

    @loops(wait=lambda binder: binder.binding.cordons.wait())
    async def cordon_nodes(self) -> None:
        """Cordon nodes whose agents do not respond, and probe the agents until they do."""
        await self.binding.cordons.step()

    # Reports

    @handles
    async def explain_waiting(self, events: Sequence[PlacementRefused | PodRejected]) -> None:
        """Write the pod's condition and an Event with why it waits, unless it has not changed."""
        for event in events:
            explanation = explain(event)
            if isinstance(event, PodRejected) and event.foreign:
                self.reports.events.record(explanation, once=True)
            elif self.reports.conditions.explain(explanation):
                self.reports.events.record(explanation)

    @handles
    async def report_violations(self, events: Sequence[ViolationFound]) -> None:
        """Write an Event with the rule that a pod's container breaks; evict the pod if required."""
        own = await self.reports.refusals.own(events)
        for event in own:
            once = event.reason == ViolationReason.CORES_NOT_LIMITED
            self.reports.events.record(violation_event(event), once=once)
        await self.preemptor.evict_violators(own)

    @handles
    async def report_health(self, events: Sequence[HealthChanged]) -> None:
        """Write Events about a device's health, for its node and every pod with a lease on it."""
        for event in await self.reports.refusals.with_own_holders(events):
            for each in health_events(event):
                self.reports.events.record(each)

    @loops
    async def write_events(self) -> None:
        """Write core/v1 Events."""
        await self.reports.events.run()

    @loops
    async def write_conditions(self) -> None:
        """Write the condition PodScheduled of pods that wait."""
        await self.reports.conditions.run()

    # The ledger

    @handles
    async def save_nodes(self, events: Sequence[NodeChanged]) -> None:
        """Save nodes' facts."""
        await self.sync.updater.save_nodes(events)

    @handles
    async def remove_deleted_nodes(self, events: Sequence[NodesListed]) -> None:
        """Remove nodes from the ledger whose deletion was missed."""
        await self.sync.reconciler.remove_deleted(events)

    @handles
    async def save_quotas(self, events: Sequence[QuotasUpdated]) -> None:
        """Save the newest quotas."""
        await self.sync.updater.save_quotas(events)

    @handles(gather_s=GATHER_REPORTS_S)
    async def save_devices(self, events: Sequence[DeviceReported]) -> None:
        """Save nodes' devices, and what their agents have activated; report invalid settings."""
        refused = await self.sync.updater.save_devices(events)
        await self.sync.rebuild.stage_reports(events)
        self.reports.refusals.refuse_all(refused)
        self.binding.presence.record_reports([each for each in events if each.node not in refused])
        for event in events:
            if event.config_errors:
                self.reports.events.record(config_event(event))

    @handles
    async def activate_shares(self, events: Sequence[ShareActivated]) -> None:
        """Record that the kubelet has a container's devices."""
        self.reports.refusals.refuse_all(await self.sync.updater.activate(events))

    @handles
    async def release_refused(self, events: Sequence[ShareRefused]) -> list[LeaseChanged]:
        """End the leases of pods that their node refused before any container started."""
        for event in await self.reports.refusals.own(events):
            shown = share_event(event)
            if shown is not None:
                self.reports.events.record(shown)
        return lease_changes(await self.sync.updater.end_refused(events))

    @handles(concurrency=2)
    async def end_leases(
        self, events: Sequence[PodTerminated]
    ) -> list[LeaseChanged | BindingFailed]:
        """End the leases of pods that are gone, unless their containers may still run."""
        for event in events:
            self.reports.conditions.forget(event.pod)
            if (rejected := rejected_event(event)) is not None:
                self.reports.events.record(rejected, once=True)
        await self.sync.gates.remove(events)
        return await self.sync.updater.end_terminated(events)

    @handles
    async def save_filtered_out(self, events: Sequence[PodFilteredOut]) -> None:
        """Save pods that kube-scheduler has no node for."""
        await self.binding.offers.save_waiting(events)

    @loops(every_s=STEP_S)
    async def end_vanished(self) -> list[LeaseChanged]:
        """Request from node agents whether the containers of vanished pods have terminated."""
        return await self.sync.updater.end_confirmed()

    @handles
    async def reconcile_listing(
        self, events: Sequence[PodsListed]
    ) -> list[PodTerminated | ClaimDeallocated | PlacementChosen | LeaseChanged]:
        """Compare the ledger with a complete listing of pods."""
        return await self.sync.reconciler.reconcile(events)

    @answers(concurrency=8)
    async def list_leases(self, event: LeasesRequest) -> LeasesReply:
        """Return a node's leases to its agent; that of a claim is restored if it was lost."""
        if event.claim is not None:
            ended = await self.binding.claim_leaser.restore(event.claim, event.node)
            await self.publish(ended)
        return LeasesReply(leases=await self.sync.updater.list_leases(event.node, event.pods))

    @loops(every_s=STEP_S)
    async def expire_reservations(self) -> list[BindingFailed | ResyncRequested]:
        """End reservations that no binder committed in time.

        After a failure of this loop or of `offer_capacity` it requests a resync of all pods.
        """
        return await self.sync.sweeper.expire()

    @loops(wait=lambda binder: binder.sync.sweeper.wait())
    async def offer_capacity(self) -> list[PodQueued]:
        """Offer freed capacity to the pods that wait for it."""
        with self.sync.sweeper.resync_on_failure():
            return await self.binding.offers.make(await self.sync.sweeper.offer())

    @loops(every_s=STEP_S)
    async def rebuild_ledger(self) -> list[LedgerRebuilt | ResyncRequested]:
        """Rebuild the ledger whenever it is empty or has lost writes."""
        return await self.sync.rebuild.step()

    @loops(every_s=STEP_S)
    async def check_records(self) -> list[ResyncRequested]:
        """Check the ledger's records, page by page."""
        return await self.sync.records.step()

    # Budgets and preemption

    @handles
    async def save_budgets(self, events: Sequence[BudgetChanged]) -> None:
        """Save the state of namespaces' budgets."""
        await self.preemptor.save_budgets(events)
        self.sync.gates.wake()

    @handles
    async def save_gated_pods(self, events: Sequence[PodGated]) -> None:
        """Save pods that wait at their budget's scheduling gate."""
        await self.sync.gates.add(events)

    @loops(wait=lambda binder: binder.sync.gates.wait())
    async def remove_gates(self) -> None:
        """Remove the scheduling gates of pods whose namespace has budget again."""
        await self.sync.gates.step()

    @loops(every_s=lambda binder: binder.preemptor.step_s)
    async def preempt(self) -> list[PlacementChosen]:
        """Preempt leases for pending pods, one binder at a time."""
        return await self.preemptor.step()

    @answers
    async def plan_preemption(self, event: DryRunRequest) -> DryRunReply:
        """Return the preemption that would be planned for a pod."""
        return await dry_run(event, self.preemptor)

    # Sizes

    @answers
    async def resize(self, event: ResizeRequest) -> ResizeReply:
        """Resize a running lease, or return why not."""
        return await self.resizer.resize(event)

    @loops(every_s=FINISH_S)
    async def finish_resizes(self) -> None:
        """Finish resizes that a binder has left unfinished."""
        await self.resizer.finish()
