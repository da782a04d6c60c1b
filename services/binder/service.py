"""The binder: binds placed pods, and keeps the ledger in sync with the cluster.

Any number of replicas may run. This module contains the handlers; the sub-packages do the work.
"""

from collections.abc import Sequence
from typing import Never

from services.binder.ledger_sync.ledger_updates import lease_changes
from services.binder.ledger_sync.sweep import SWEEP_S
from services.binder.parts import Bindings, LedgerSync, Reports
from services.binder.ports.ledger import LeaseLedger
from services.binder.ports.nats import Publish
from services.binder.preempt.preemption_controller import PreemptionController
from services.binder.report.explanations import (
    config_event,
    explain,
    health_events,
    rejected_event,
    share_event,
    violation_event,
    waiting_event,
)
from services.binder.resize.resizer import Resizer
from shared.model.clock import Clock, until_next
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
from shared.runtime.service import answers, handles, loops, publishes

VANISHED_S = 1.0
REBUILD_S = 1.0
CHECK_S = 1.0
GATHER_REPORTS_S = 0.1
"""Agents report one by one, and often: reports that share a script call cost much less."""


@publishes(
    BindRequest,
    TerminationRequest,
    LimitsRequest,
    LeaseResized,
    LedgerRebuilt,
    PodTerminated,
    ResyncRequested,
    PodQueued,
    SlicesRequest,
)
class Binder:
    """Stateless except for Bindings in flight; the ledger and the API server store the state."""

    def __init__(
        self,
        *,
        ledger: LeaseLedger,
        publish: Publish,
        binding: Bindings,
        sync: LedgerSync,
        reports: Reports,
        preemptor: PreemptionController,
        resizer: Resizer,
        clock: Clock,
    ) -> None:
        self.ledger = ledger
        self.publish = publish
        self.binding = binding
        self.sync = sync
        self.reports = reports
        self.preemptor = preemptor
        self.resizer = resizer
        self.clock = clock

    # Bindings

    @handles(concurrency=16)
    async def bind_pods(
        self, events: Sequence[PlacementChosen]
    ) -> list[PodBound | BindingFailed | LeaseChanged]:
        """Commit the leases, publish them to their nodes, bind the pods; release what failed.

        A lease that moved on is dropped: no event is published for it. A lease that has ended is a
        failed binding, and its pod is queued again if it still waits. A node's pods are bound in
        turn, as its agent admits them, for `BatchTiming.wait_s` seconds. The batch is redelivered
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
        return await self.binding.claim_admission.lease(event)

    @loops
    async def end_unwritten_claims(self) -> None:
        """End leases whose allocations were not written after all."""
        while True:
            ended = lease_changes(await self.binding.claim_admission.end_unwritten())
            if ended:
                await self.publish(ended)
            await self._sleep_until_next(VANISHED_S)

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

    @loops
    async def cordon_nodes(self) -> None:
        """Cordon nodes whose agents do not respond, and probe the agents until they do."""
        while True:
            await self.binding.cordons.step()
            await self.binding.cordons.wait()

    # Reports

    @handles
    async def explain_waiting(
        self, events: Sequence[PlacementRefused | PodRejected]
    ) -> list[Never]:
        """Write the pod's condition and an Event with why it waits, unless it has not changed."""
        for event in events:
            explanation = explain(event)
            if self.reports.conditions.explain(explanation):
                self.reports.events.record(waiting_event(explanation))
        return []

    @handles
    async def report_violations(self, events: Sequence[ViolationFound]) -> list[Never]:
        """Write an Event with the rule that a pod's container breaks; evict the pod if required."""
        own = await self.reports.refusals.own(events)
        for event in own:
            once = event.reason == ViolationReason.CORES_NOT_LIMITED
            self.reports.events.record(violation_event(event), once=once)
        await self.preemptor.evict_violators(own)
        return []

    @handles
    async def report_health(self, events: Sequence[HealthChanged]) -> list[Never]:
        """Write Events about a device's health, for its node and every pod with a lease on it."""
        for event in await self.reports.refusals.with_own_holders(events):
            for each in health_events(event):
                self.reports.events.record(each)
        return []

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
    async def save_nodes(self, events: Sequence[NodeChanged]) -> list[Never]:
        """Save nodes' facts."""
        await self.sync.updater.save_nodes(events)
        return []

    @handles
    async def remove_deleted_nodes(self, events: Sequence[NodesListed]) -> list[Never]:
        """Remove nodes from the ledger whose deletion was missed."""
        await self.sync.deleted_nodes.remove(events)
        return []

    @handles
    async def save_quotas(self, events: Sequence[QuotasUpdated]) -> list[Never]:
        """Save the newest quotas."""
        newest = max(events, key=lambda event: event.read_at)
        await self.ledger.quotas.save(newest.quotas, read_at=newest.read_at)
        self.sync.sweeper.capacity_freed()
        return []

    @handles(gather_s=GATHER_REPORTS_S)
    async def save_devices(self, events: Sequence[DeviceReported]) -> list[Never]:
        """Save nodes' devices, and what their agents have activated; report invalid settings."""
        refused = await self.sync.updater.save_devices(events)
        await self.sync.rebuild.stage_reports(events)
        self.reports.refusals.refuse_all(refused)
        self.binding.presence.record_reports([each for each in events if each.node not in refused])
        for event in events:
            if event.config_errors:
                self.reports.events.record(config_event(event))
        return []

    @handles
    async def activate_shares(self, events: Sequence[ShareActivated]) -> list[Never]:
        """Record that the kubelet has a container's devices."""
        self.reports.refusals.refuse_all(await self.sync.updater.activate(events))
        return []

    @handles
    async def release_refused(self, events: Sequence[ShareRefused]) -> list[LeaseChanged]:
        """End the leases of pods that their node refused before any container started."""
        for event in await self.reports.refusals.own(events):
            shown = share_event(event)
            if shown is not None:
                self.reports.events.record(shown)
        return self._freed(lease_changes(await self.sync.updater.end_refused(events)))

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
        ended = await self.sync.updater.end_terminated(events)
        if ended:
            self.sync.sweeper.capacity_freed()
        return ended

    @handles
    async def save_filtered_out(self, events: Sequence[PodFilteredOut]) -> list[Never]:
        """Save pods that kube-scheduler has no node for."""
        await self.binding.offers.save_waiting(events)
        return []

    @loops
    async def end_vanished(self) -> None:
        """Request from node agents whether the containers of vanished pods have terminated."""
        while True:
            ended = self._freed(await self.sync.updater.end_confirmed())
            if ended:
                await self.publish(ended)
            await self._sleep_until_next(VANISHED_S)

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
        if not event.pods:
            return LeasesReply(leases=tuple(await self.ledger.load_node(event.node)))
        found = await self.ledger.load(event.pods)
        return LeasesReply(
            leases=tuple(lease for lease in found if lease and lease.node == event.node)
        )

    @loops
    async def expire_reservations(self) -> None:
        """End reservations that no binder committed in time.

        After a failure of this loop or of `offer_capacity` it requests a resync of all pods.
        """
        sweeper = self.sync.sweeper
        while True:
            if sweeper.resync_needed:
                await self.ledger.generation()
                reason = "the ledger or NATS was unavailable"
                await self.publish([ResyncRequested(reason=reason)])
                sweeper.resync_needed = False
            with sweeper.resync_on_failure():
                failures = await sweeper.expire()
                if failures:
                    await self.publish(failures)
            await self._sleep_until_next(SWEEP_S)

    @loops
    async def offer_capacity(self) -> None:
        """Offer freed capacity to the pods that wait for it."""
        sweeper = self.sync.sweeper
        while True:
            with sweeper.resync_on_failure():
                offers = await sweeper.offer()
                if queued := await self.binding.offers.make(offers):
                    await self.publish(queued)
            await sweeper.wait()

    @loops
    async def rebuild_ledger(self) -> None:
        """Rebuild the ledger whenever it is empty or has lost writes."""
        while True:
            events = await self.sync.rebuild.step()
            if events:
                await self.publish(events)
                self.sync.rebuild.mark_published()
            await self._sleep_until_next(REBUILD_S)

    @loops
    async def check_records(self) -> None:
        """Check the ledger's records, page by page."""
        while True:
            requests = await self.sync.records.step()
            if requests:
                await self.publish(requests)
            await self._sleep_until_next(CHECK_S)

    # Budgets and preemption

    @handles
    async def save_budgets(self, events: Sequence[BudgetChanged]) -> list[Never]:
        """Save the state of namespaces' budgets."""
        await self.preemptor.save_budgets(events)
        self.sync.gates.wake()
        return []

    @handles
    async def save_gated_pods(self, events: Sequence[PodGated]) -> list[Never]:
        """Save pods that wait at their budget's scheduling gate."""
        await self.sync.gates.add(events)
        return []

    @loops
    async def remove_gates(self) -> None:
        """Remove the scheduling gates of pods whose namespace has budget again."""
        while True:
            await self.sync.gates.step()
            await self.sync.gates.wait()

    @loops
    async def preempt(self) -> None:
        """Preempt leases for pending pods, one binder at a time."""
        while True:
            placements = await self.preemptor.step()
            if placements:
                await self.publish(placements)
            await self._sleep_until_next(self.preemptor.step_s)

    # Sizes

    @answers
    async def resize(self, event: ResizeRequest) -> ResizeReply:
        """Resize a running lease, or return why not."""
        return await self.resizer.resize(event)

    @loops
    async def finish_resizes(self) -> None:
        """Finish resizes that a binder has left unfinished."""
        await self.resizer.run()

    async def _sleep_until_next(self, every_s: float) -> None:
        await self.clock.sleep(until_next(self.clock.ticks(), every_s))

    def _freed(self, ended: list[LeaseChanged]) -> list[LeaseChanged]:
        if ended:
            self.sync.sweeper.capacity_freed()
        return ended
