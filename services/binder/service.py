"""The binder: sends the Binding of every placement, and keeps the ledger in step with the cluster.

Any number of replicas may run. The handlers are here; what they do is in the files they call.
"""

from collections.abc import Sequence
from typing import Never

from services.binder.bind.agent_presence import AgentPresence
from services.binder.bind.binding import BindingOutcome, BindingResult
from services.binder.bind.binding_sender import BindingSender
from services.binder.bind.deferred_pods import DeferredPods
from services.binder.ledger_sync.ledger_updates import LedgerUpdater, binding_failed, lease_changes
from services.binder.ledger_sync.node_cordons import NodeCordons
from services.binder.ledger_sync.rebuild import LedgerRebuild
from services.binder.ledger_sync.reconciliation import Reconciler
from services.binder.ledger_sync.scheduling_gates import SchedulingGates
from services.binder.ledger_sync.sweep import SWEEP_S, Sweeper
from services.binder.ports.general import Preemptor, Publishing
from services.binder.ports.ledger import Ledger
from services.binder.report.condition_writer import ConditionWriter
from services.binder.report.event_writer import EventWriter
from services.binder.report.explanations import (
    bound_event,
    explain,
    health_events,
    lease_event,
    share_event,
    violation_event,
    waiting_event,
)
from services.binder.resize.resizer import Resizer
from shared.model.clock import Clock
from shared.model.errors import UnavailableError
from shared.model.events.node_events import (
    DeviceReported,
    HealthChanged,
    ShareActivated,
    ShareRefused,
    ViolationFound,
)
from shared.model.events.pod_events import (
    BindingFailed,
    BudgetChanged,
    LeaseChanged,
    NodeChanged,
    PlacementChosen,
    PlacementRefused,
    PodBound,
    PodGated,
    PodRejected,
    PodsListed,
    PodTerminated,
    QuotasUpdated,
    ResyncRequested,
)
from shared.model.events.request_reply import LeasesReply, LeasesRequest, ResizeReply, ResizeRequest
from shared.model.lease import Lease
from shared.runtime.service import answers, handles, loops

ASK_S = 1.0
RECLAIM_S = 0.5
TURNS_S = 1.0
"""So long a batch waits for the turns of its pods before it makes room for others."""
TURN_S = 0.02
"""A kubelet asks for a pod within a few of these; a slower one is waited for in longer steps."""
TURN_MOST_S = 0.3
ENDED = "the reservation had ended before it was bound"
REBUILD_S = 0.5


class Binder:
    """Stateless but for what is under way; the ledger and the API server remember."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        bus: Publishing,
        sender: BindingSender,
        presence: AgentPresence,
        cordons: NodeCordons,
        holder: DeferredPods,
        updater: LedgerUpdater,
        sweeper: Sweeper,
        reconciler: Reconciler,
        rebuild: LedgerRebuild,
        events: EventWriter,
        conditions: ConditionWriter,
        preemptor: Preemptor,
        gatekeeper: SchedulingGates,
        resizer: Resizer,
        clock: Clock,
    ) -> None:
        self.ledger = ledger
        self.bus = bus
        self.sender = sender
        self.presence = presence
        self.cordons = cordons
        self.holder = holder
        self.updater = updater
        self.sweeper = sweeper
        self.reconciler = reconciler
        self.rebuild = rebuild
        self.events = events
        self.conditions = conditions
        self.preemptor = preemptor
        self.gatekeeper = gatekeeper
        self.resizer = resizer
        self.clock = clock

    # Bindings

    @handles(concurrency=16)
    async def bind_pods(
        self, events: Sequence[PlacementChosen]
    ) -> list[PodBound | BindingFailed | LeaseChanged]:
        """Commit the leases, tell their nodes, bind the pods; give back what cannot be bound.

        A lease that moved on is dropped: nothing is sent for it; one that has ended has failed, and
        its pod, if it still waits, is told of again. A node's pods go in turn, as its agent says,
        for `TURNS_S` seconds. Pods whose outcome nobody knows yet bring the batch back after a
        pause, and so do those whose node's agent is away or asks to wait; what is known by then is
        said at once.
        """
        left = {event.lease.pod: event for event in events}
        unknown: list[str] = []
        until, pause_s = self.clock.ticks() + TURNS_S, TURN_S
        while True:
            held = await self.presence.deferrals([event.lease for event in left.values()])
            said, doubts = await self._bind([e for pod, e in left.items() if pod not in held])
            unknown += doubts
            if not any(why.soon for why in held.values()) or self.clock.ticks() > until:
                break
            await self.bus.publish(said)
            pause_s = TURN_S if len(held) < len(left) else min(2 * pause_s, TURN_MOST_S)
            left = {pod: left[pod] for pod in held}
            await self.clock.sleep(pause_s)
        kept = await self.holder.hold(held, {pod: left[pod].lease.node for pod in held})
        said += self._freed(lease_changes(kept.given_up))
        over = dict.fromkeys(kept.ended, ENDED)
        over |= {lease.pod: held[lease.pod].reason for lease in kept.given_up}
        said += [binding_failed(left[pod].lease, why, left[pod].trace) for pod, why in over.items()]
        unknown += [held[lease.pod].reason for lease in kept.kept]
        if unknown:
            await self.bus.publish(said)
            raise UnavailableError(
                f"{len(unknown)} of {len(events)} bindings are not known yet: {unknown[0]}"
            )
        return said

    async def _bind(
        self, events: Sequence[PlacementChosen]
    ) -> tuple[list[PodBound | BindingFailed | LeaseChanged], list[str]]:
        """Bind these; return what is to be said, and why the outcome of some is not known."""
        chosen = {event.lease.pod: event for event in events}
        committed = await self.ledger.bind([event.lease for event in events])
        leases = [lease for lease in committed if isinstance(lease, Lease)]
        late = [
            stale.pod for stale in committed if not isinstance(stale, Lease) and not stale.stored
        ]
        await self.bus.publish([LeaseChanged(lease=lease) for lease in leases])
        traces = [chosen[lease.pod].trace or lease.trace for lease in leases]
        verdicts = await self.sender.post(list(zip(leases, traces, strict=True)))
        said = await self._say(leases, traces, verdicts)
        said += [binding_failed(chosen[pod].lease, ENDED, chosen[pod].trace) for pod in late]
        return said, [v.reason for v in verdicts if v.outcome is BindingOutcome.UNKNOWN]

    async def _say(
        self, leases: Sequence[Lease], traces: Sequence[str], verdicts: Sequence[BindingResult]
    ) -> list[PodBound | BindingFailed | LeaseChanged]:
        now = self.clock.now()
        said: list[PodBound | BindingFailed | LeaseChanged] = []
        failed: list[Lease] = []
        for lease, trace, verdict in zip(leases, traces, verdicts, strict=True):
            if verdict.outcome is BindingOutcome.BOUND:
                said.append(PodBound(lease=lease, latency_s=now - lease.created_at, trace=trace))
                self.conditions.forget(lease.pod)
                self.events.note(bound_event(lease), once=True)
            elif verdict.failed:
                failed.append(lease)
                said.append(binding_failed(lease, verdict.reason, trace))
                self.events.note(lease_event(lease, "FailedBinding", verdict.reason))
        if failed:
            pods = [lease.pod for lease in failed]
            said += lease_changes(await self.ledger.release(pods, reason="the binding failed"))
            self.sweeper.freed()
        return said

    @loops
    async def post_bindings(self) -> None:
        """Send Bindings, a fixed number in parallel."""
        await self.sender.work()

    # Explanations

    @handles
    async def explain_waiting(
        self, events: Sequence[PlacementRefused | PodRejected]
    ) -> list[Never]:
        """Have the pod's condition and an Event say why it waits; what was said is not repeated."""
        for event in events:
            why = explain(event)
            if self.conditions.explain(why):
                self.events.note(waiting_event(why))
        return []

    @handles
    async def give_back_refused(self, events: Sequence[ShareRefused]) -> list[LeaseChanged]:
        """End the leases of pods that their node refused before any container of them started."""
        for event in events:
            note = share_event(event)
            if note is not None:
                self.events.note(note)
        return self._freed(lease_changes(await self.updater.end_refused(events)))

    @handles
    async def tell_violations(self, events: Sequence[ViolationFound]) -> list[Never]:
        """Have an Event say which rule a pod's container breaks, and perhaps the pod evicted."""
        for event in events:
            self.events.note(violation_event(event))
        await self.preemptor.evict_violators(events)
        return []

    @handles
    async def tell_health(self, events: Sequence[HealthChanged]) -> list[Never]:
        """Have Events say which device is sick, of its node and of every pod with a lease on it."""
        for event in events:
            for note in health_events(event):
                self.events.note(note)
        return []

    @loops
    async def write_events(self) -> None:
        """Write core/v1 Events."""
        await self.events.work()

    @loops
    async def write_conditions(self) -> None:
        """Write the condition PodScheduled of pods that wait."""
        await self.conditions.work()

    # The ledger

    @handles
    async def keep_nodes(self, events: Sequence[NodeChanged]) -> list[Never]:
        """Save nodes' facts."""
        await self.updater.save_nodes(events)
        return []

    @handles
    async def keep_quotas(self, events: Sequence[QuotasUpdated]) -> list[Never]:
        """Save the newest word of what namespaces may hold."""
        newest = max(events, key=lambda event: event.read_at)
        await self.ledger.quotas.save(newest.quotas, read_at=newest.read_at)
        self.sweeper.freed()
        return []

    @handles
    async def keep_devices(self, events: Sequence[DeviceReported]) -> list[Never]:
        """Save nodes' devices, and what their agents have activated."""
        await self.rebuild.stage_reports(events)
        await self.updater.save_devices(events)
        self.presence.hear(events)
        return []

    @handles
    async def activate_shares(self, events: Sequence[ShareActivated]) -> list[Never]:
        """Record that the kubelet was told of a container's shares."""
        await self.updater.activate(events)
        return []

    @handles(concurrency=2)
    async def end_leases(self, events: Sequence[PodTerminated]) -> list[LeaseChanged]:
        """End the leases of pods that are gone, unless they may still run."""
        for event in events:
            self.conditions.forget(event.pod)
        return self._freed(await self.updater.end_terminated(events))

    @handles
    async def compare_listing(
        self, events: Sequence[PodsListed]
    ) -> list[PodTerminated | PlacementChosen]:
        """Compare the ledger with a complete listing."""
        return await self.reconciler.hear(events)

    @answers
    async def tell_leases(self, event: LeasesRequest) -> LeasesReply:
        """Tell a node's agent its leases."""
        if not event.pods:
            return LeasesReply(leases=tuple(await self.ledger.load_node(event.node)))
        found = await self.ledger.load(event.pods)
        return LeasesReply(
            leases=tuple(lease for lease in found if lease and lease.node == event.node)
        )

    # Sizes

    @answers
    async def resize(self, event: ResizeRequest) -> ResizeReply:
        """Give a running lease another size, or say why not."""
        return await self.resizer.resize(event)

    @loops
    async def finish_resizes(self) -> None:
        """See through what was resized by a binder that is gone, or on a node that was away."""
        await self.resizer.run()

    # What is over budget

    @handles
    async def hear_budgets(self, events: Sequence[BudgetChanged]) -> list[Never]:
        """Remember how namespaces' budgets stand."""
        await self.preemptor.hear(events)
        self.gatekeeper.wake()
        return []

    @handles
    async def hold_gated(self, events: Sequence[PodGated]) -> list[Never]:
        """Remember pods that wait at their budget's scheduling gate."""
        await self.gatekeeper.hold(events)
        return []

    @loops
    async def open_gates(self) -> None:
        """Open the scheduling gates of pods whose namespace has budget again."""
        while True:
            await self.gatekeeper.step()
            await self.gatekeeper.wait()

    @loops
    async def take_back(self) -> None:
        """Take leases back for pods in need, one binder at a time."""
        while True:
            chosen = await self.preemptor.step()
            if chosen:
                await self.bus.publish(chosen)
            await self.clock.sleep(RECLAIM_S)

    # What happens by itself

    @loops
    async def watch_shut_nodes(self) -> None:
        """Tell which nodes nobody may be bound to, and ask their agents until they answer."""
        while True:
            await self.cordons.step()
            await self.cordons.wait()

    @loops
    async def expire_reservations(self) -> None:
        """End reservations that nobody bound in time.

        Whenever this or an offer had no answer, all waiting pods are told of again.
        """
        while True:
            if self.sweeper.resync_needed:
                await self.ledger.generation()
                await self.bus.publish([ResyncRequested(reason="the ledger or NATS was away")])
                self.sweeper.resync_needed = False
            with self.sweeper.resync_on_failure():
                failures = await self.sweeper.expire()
                if failures:
                    await self.bus.publish(failures)
            await self.clock.sleep(SWEEP_S)

    @loops
    async def offer_capacity(self) -> None:
        """Offer what was freed to the pods that wait for it."""
        while True:
            with self.sweeper.resync_on_failure():
                offers = await self.sweeper.offer()
                if offers:
                    await self.bus.publish(offers)
            await self.sweeper.wait()

    @loops
    async def ask_endings(self) -> None:
        """Ask agents whether vanished pods have ended."""
        while True:
            ended = self._freed(await self.updater.end_confirmed())
            if ended:
                await self.bus.publish(ended)
            await self.clock.sleep(ASK_S)

    @loops
    async def rebuild_ledger(self) -> None:
        """LedgerRebuild the ledger whenever it turns out to be empty."""
        while True:
            rebuilt = await self.rebuild.step()
            if rebuilt is not None:
                self.updater.forget()
                await self.bus.publish([rebuilt])
                self.rebuild.lease_changes()
            await self.clock.sleep(REBUILD_S)

    def _freed(self, ended: list[LeaseChanged]) -> list[LeaseChanged]:
        if ended:
            self.sweeper.freed()
        return ended
