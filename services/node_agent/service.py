"""The node agent: which events it consumes and publishes, and its loops."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace

from services.node_agent.allocate.failed_grants import FailedGrants
from services.node_agent.allocate.numa_alignment import CPUS_TAKEN, LIST_NOT_TAKEN, NumaAlignment
from services.node_agent.compute_time.steering import TimeSteering
from services.node_agent.container_runtime.runtime_watch import RuntimeWatch
from services.node_agent.device_watcher import DeviceWatcher
from services.node_agent.dra.driver import ClaimDriver
from services.node_agent.kubelet.registration import DevicePlugins
from services.node_agent.mps.watch import MpsWatch
from services.node_agent.node import Node
from services.node_agent.reconcile.checkpoint_reconciler import CheckpointReconciler
from services.node_agent.reconcile.leftovers import Leftovers
from services.node_agent.records.device_guard import (
    close_devices,
    close_exceeded,
    close_unrecorded,
)
from services.node_agent.resize.limit_updates import LimitUpdater
from services.node_agent.time_slices.time_slices import SETTLE_S, TimeSlices
from services.node_agent.usage.monitor import UsageMonitor
from services.node_agent.views.node_views import ViewWriter
from shared.model.clock import until_tick, wait_for_event
from shared.model.devices.device import Device
from shared.model.devices.node import AGENT_STARTING, AGENT_STOPPING
from shared.model.errors import UnavailableError
from shared.model.events.node_events import (
    DeviceReported,
    HealthChanged,
    ShareActivated,
    ShareRefused,
    ViolationFound,
)
from shared.model.events.pod_events import LeaseChanged, ResyncRequested
from shared.model.events.request_reply import (
    BindReply,
    BindRequest,
    ClaimRestoreRequest,
    LeasesRequest,
    LimitsReply,
    LimitsRequest,
    SlicesReply,
    SlicesRequest,
    TerminationReply,
    TerminationRequest,
    UsageReply,
    UsageRequest,
)
from shared.model.names import DeviceUuid
from shared.runtime.service import answers, emits, handles, loops, publishes

GRACE_S = 0.5
"""After this time, binders have bound the pods that were admitted last."""
LOOK_S = 0.1
"""Interval of looks whether containers have started before a stopping agent ends."""
REPLY_S = 1.0
"""How long a stopping agent waits for the list of its leases."""


logger = logging.getLogger(__name__)

REPORT_S = 10.0
"""Interval of device reports without a change."""
CLEANUP_S = 10.0
"""Interval of cleanups of ended pods, and of probes of the disk."""
LEASE_SYNC_S = 30.0
"""Interval of requests for all leases of the node."""
LEASE_SYNC_RETRY_S = 1.0
"""Pause after such a request without a reply."""
MIN_REPORT_STEP_S = 0.001
"""A report is later than the one before by this, also if the clock was set back."""
RUNTIME_S = 600.0
"""Interval of looks at the container runtime's settings."""
UNSERVED_S = 5.0
"""A resource that the kubelet could not allocate for this long is not reported as served."""
REGISTRATION_LOOK_S = 1.0
"""Interval of looks at registrations until all resources are allocatable."""
RECORDS_LOST = "its node agent rebuilds its records of what runs there"


@publishes(ClaimRestoreRequest, LeasesRequest)
class NodeAgent:
    def __init__(
        self,
        node: Node,
        *,
        watcher: DeviceWatcher,
        reconciler: CheckpointReconciler,
        plugins: DevicePlugins,
        claims: ClaimDriver | None,
        limits: LimitUpdater,
        usage: UsageMonitor,
        steering: TimeSteering,
        mps: MpsWatch,
        time_slices: TimeSlices,
        views: ViewWriter,
        runtime: RuntimeWatch,
        failed: FailedGrants,
    ) -> None:
        self.route = node.name
        self.node = node
        self.watcher = watcher
        self.mig = watcher.mig
        self.checkpoint = node.checkpoint
        self.leases = node.leases
        self.reconciler = reconciler
        self.window = watcher.window
        self.numa = NumaAlignment(node, plugins, self.window)
        self.pods = reconciler.pods
        self.leftovers = Leftovers(node, reconciler)
        self.plugins = plugins
        self.claims = claims
        self.limits = limits
        self.usage = usage
        self.steering = steering
        self.mps = mps
        self.time_slices = time_slices
        self.views = views
        self.runtime = runtime
        self.failed = failed
        self.clock = node.clock
        self._sync_due = asyncio.Event()
        self._reported_at = 0.0
        self._was_unreadable = False
        self._exceeded: frozenset[DeviceUuid] = frozenset()

    @property
    def probes(self) -> Mapping[str, Callable[[], str | None]]:
        probes = {
            "gpus": self.watcher.unready_reason,
            "kubelet": self.plugins.unready_reason,
            "api": self.views.unready_reason,
        }
        return probes if self.claims is None else {**probes, "dra": self.claims.unready_reason}

    # Consumes

    @handles
    async def observe_leases(self, events: Sequence[LeaseChanged]) -> None:
        changed = self.leases.observe(event.lease for event in events)
        if self._exceeded.intersection(share.device for lease in changed for share in lease.shares):
            self.node.report_due.set()
        self._leases_changed()

    @handles
    async def resync(self, events: Sequence[ResyncRequested]) -> None:
        self.node.report_due.set()
        self._sync_due.set()

    @answers
    async def report_terminated(self, event: TerminationRequest) -> TerminationReply:
        """A pod with devices allocated in the last `starting_s` may still start its containers."""
        starting = self.checkpoint.allocated_since(self.clock.now() - self.node.timing.starting_s)
        asked = {event.pod, *event.more_pods} - starting - self.checkpoint.claims
        terminated = await self.reconciler.terminated(asked)
        self.leftovers.note_vanished(asked - terminated)
        return TerminationReply(
            terminated=event.pod in terminated,
            terminated_pods=tuple(pod for pod in event.more_pods if pod in terminated),
        )

    @answers
    async def admit_binds(self, event: BindRequest) -> BindReply:
        unready = (
            self.node.files.unwritable_reason
            or self.node.files.disk_pressure()
            or self.node.cdi.unwritable_reason
            or self.node.unresolved_reason
            or (RECORDS_LOST if self.checkpoint.lost else None)
            or await self.pods.blind_reason()
        )
        short = await self.numa.short_of_cpus(event.leases)
        unreadable = self.pods.unreadable_reason
        reply = self.window.admit_binds(
            [lease for lease in event.leases if lease.pod not in short],
            unready,
            unreadable_reason=unreadable,
            unserved=self.plugins.unserved(),
            is_serving=self.plugins.handler.patience.is_serving,
        )
        if short:  # to be placed again at once
            reply = replace(
                reply,
                unserved_pods=reply.unserved_pods + short,
                unserved_reason=reply.unserved_reason or CPUS_TAKEN,
                unserved_s=max(reply.unserved_s, UNSERVED_S),
            )
        if await self.numa.align() or reply.node_closed:
            return reply
        left = (lease.pod for lease in event.leases if lease.pod not in reply.unserved_pods)
        return replace(reply, deferred_pods=tuple(left), reason=LIST_NOT_TAKEN)

    @answers
    async def update_limits(self, event: LimitsRequest) -> LimitsReply:
        return await self.limits.apply_request(event)

    @answers
    async def write_slices(self, event: SlicesRequest) -> SlicesReply:
        if self.claims is None:
            return SlicesReply(written=False, reason=f"--dra of node {self.route} is off")
        try:
            await self.node.lease_sync.sync()
        except UnavailableError as error:
            return SlicesReply(written=False, reason=str(error))
        reason = await self.claims.slices.write_now(renewed=event.renewed)
        return SlicesReply(written=not reason, reason=reason)

    @answers
    async def report_usage(self, event: UsageRequest) -> UsageReply:
        return self.usage.report(self.watcher.health.latest_xids)

    async def drain(self) -> None:
        """Wait until the kubelet starts the admitted pods."""
        self.window.draining = True
        self.node.report_due.set()
        began_at = self.clock.ticks()
        timing = self.node.timing
        await self.clock.sleep(GRACE_S)
        while True:
            try:
                await self.node.lease_sync.sync(timeout_s=REPLY_S)
            except UnavailableError as error:  # the known leases count
                logger.debug("draining without a list of the node's leases: %s", error)
            drained_s = self.clock.ticks() - began_at
            is_late = drained_s > timing.drain_s
            coming = self.window.coming()
            if (is_late and self.plugins.unready_reason()) or drained_s > timing.relist_s:
                coming = {}  # the kubelet is away, or does not receive them
            if not coming and (is_late or not self.checkpoint.starts_due(self.clock.now())):
                break
            await self.clock.sleep(LOOK_S)
        left = self.window.in_flight().values()
        if left:
            logger.warning(
                "stopping while %d pods wait for devices, which the kubelet will refuse: %s",
                len(left),
                ", ".join(f"{lease.namespace}/{lease.name}" for lease in left),
            )

    # Publishes

    @emits
    async def reports(self) -> AsyncIterator[Sequence[DeviceReported]]:
        while True:
            await wait_for_event(self.node.report_due, until_tick(REPORT_S))
            self.node.report_due.clear()
            if self.node.devices:
                served, newly_served = self._served()
                yield [
                    DeviceReported(
                        node=self.route,
                        devices=self._reported_devices(),
                        served=served,
                        newly_served=newly_served,
                        allocations=self.checkpoint.reported,
                        reported_at=self._next_reported_at(),
                        pods_unreadable=bool(self.pods.unreadable_reason),
                        fences=self.checkpoint.device_fences,
                        config_errors=self.node.take_config_errors(),
                        unread=self.node.unread,
                    )
                ]

    def _reported_devices(self) -> tuple[Device, ...]:
        closed = close_unrecorded(self.node.devices, self.checkpoint.unrecorded)
        closed = close_devices(closed, self.node.closed)
        reported, self._exceeded = close_exceeded(closed, self.leases.leases.values())
        return self.numa.described(self.leftovers.described(reported))

    def _served(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """If no resource has been registered for `UNSERVED_S`, all stay: the node is closed."""
        if self.window.draining:
            return (AGENT_STOPPING,), ()
        if not self.numa.is_known:
            return (AGENT_STARTING,) * self.numa.is_starting, ()
        unserved = self.plugins.unserved()
        newly_served = self.plugins.newly_served()
        usable = [
            name
            for name in self.node.shown.served
            if name not in unserved or not unserved[name].plugin_amount
        ]
        lost = {name for name, resource in unserved.items() if resource.for_s >= UNSERVED_S}
        served = [name for name in usable if name not in lost] or usable
        return tuple(served), tuple(name for name in served if name in newly_served)

    def _next_reported_at(self) -> float:
        """Consumers drop reports that are older than the last one."""
        self._reported_at = max(self.clock.now(), self._reported_at + MIN_REPORT_STEP_S)
        return self._reported_at

    @emits
    async def shares(self) -> AsyncIterator[Sequence[ShareActivated | ShareRefused]]:
        while True:
            yield await self.node.outbox.take()

    @emits
    async def violations(self) -> AsyncIterator[Sequence[ViolationFound]]:
        while True:
            yield await self.usage.violations()

    @emits
    async def health(self) -> AsyncIterator[Sequence[HealthChanged]]:
        while True:
            yield await self.watcher.health.changes()

    # Loops

    @loops
    async def watch_gpus(self) -> None:
        await self.watcher.run()

    @loops
    async def watch_usage(self) -> None:
        await self.usage.run()

    @loops
    async def audit_limits(self) -> None:
        await self.usage.audit.run()

    @loops
    async def steer_time(self) -> None:
        await self.steering.run()

    @loops
    async def drain_mps(self) -> None:
        await self.mps.drain_ending()

    @loops
    async def probe_mps(self) -> None:
        await self.mps.probe_servers()

    @loops(every_s=SETTLE_S)
    async def keep_time_slices(self) -> None:
        await self.time_slices.settle()

    @loops(every_s=RUNTIME_S)
    async def watch_runtime(self) -> None:
        await self.runtime.check()

    @loops
    async def update_running_limits(self) -> None:
        await self.limits.run()

    @loops
    async def partition_devices(self) -> None:
        await self.mig.run()

    @loops
    async def try_again(self) -> None:
        await self.failed.run()

    @loops
    async def serve_kubelet(self) -> None:
        await self.plugins.run()

    @loops(wait=lambda agent: agent.numa.wait())
    async def align_numa(self) -> None:
        await self.numa.refresh()

    @loops
    async def serve_claims(self) -> None:
        if self.claims is None:
            await asyncio.Event().wait()
        else:
            await self.claims.run()

    @loops
    async def report_registrations(self) -> None:
        reported = self._served()
        while True:
            settling = self.plugins.unserved() or self.plugins.newly_served()
            look_s = until_tick(REGISTRATION_LOOK_S) if settling else None
            await wait_for_event(self.plugins.served_changed, look_s)
            self.plugins.served_changed.clear()
            served = self._served()
            if served != reported:
                self.node.report_due.set()
            reported = served

    @loops
    async def compare_records(self) -> None:
        await self.leftovers.run()

    @loops
    async def update_views(self) -> None:
        await self.views.run()

    @loops(every_s=CLEANUP_S)
    async def clean_up(self) -> None:
        await self.node.files.probe_disk()
        try:
            await self.reconciler.remove_ended()
            self.watcher.advertise_amounts()  # pods whose shares were resized may have ended
        finally:
            is_unreadable = bool(self.pods.unreadable_reason)
            if is_unreadable != self._was_unreadable:
                self.node.report_due.set()
            self._was_unreadable = is_unreadable

    @loops
    async def sync_leases(self) -> None:
        pause_s = 0.0
        while True:
            await wait_for_event(self._sync_due, pause_s)
            self._sync_due.clear()
            synced = await self._sync()
            pause_s = until_tick(LEASE_SYNC_S if synced else LEASE_SYNC_RETRY_S)

    async def _sync(self) -> bool:
        try:
            await self.node.lease_sync.sync()
        except UnavailableError as error:
            logger.debug("the node's leases are not known: %s", error)
            return False
        self._leases_changed()
        if self.checkpoint.lost:
            await self.reconciler.rebuild()
            await self.watcher.record_devices()
            self.node.report_due.set()
        return not self.checkpoint.lost

    def _leases_changed(self) -> None:
        self.node.compare_due.set()
        self.mig.leases_changed()
        self.limits.wake()
        if self.claims is not None:
            self.claims.slices.request()
