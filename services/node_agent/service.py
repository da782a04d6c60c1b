"""The node agent: what it hears, says and keeps doing."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

from services.node_agent.allocate.allocation import NodeSnapshot
from services.node_agent.allocate.handler import AllocationHandler
from services.node_agent.drain import drained
from services.node_agent.gpus import inventory
from services.node_agent.gpus.device_faults import Fault, no_response
from services.node_agent.gpus.health_monitor import HealthMonitor
from services.node_agent.gpus.inventory import Gpu
from services.node_agent.gpus.sharing_config import SharingConfig, without_isolation
from services.node_agent.kubelet.admission_window import AdmissionWindow
from services.node_agent.ports import (
    Cleaning,
    Gpus,
    Limits,
    MigLayouts,
    NodeViews,
    Plugins,
    Records,
    Reporting,
    SharingConfigSource,
    Specifying,
    Watching,
)
from services.node_agent.records.checkpoint_rebuild import ended_pods
from services.node_agent.records.rebuild_writer import rebuild_record
from services.node_agent.timeouts import set_within
from services.node_agent.usage.violations import violation_events
from services.node_agent.views.advertisement import NodeAdvertisement, advertisement_of
from shared.dialects.advertised import NodeSoftware
from shared.dialects.dialect import (
    Dialect,
    Paths,
)
from shared.model.clock import Clock
from shared.model.device import Device
from shared.model.errors import LeaseholdError, UnavailableError
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
    LeasesReply,
    LeasesRequest,
    LimitsReply,
    LimitsRequest,
    TerminationReply,
    TerminationRequest,
)
from shared.model.names import NodeName
from shared.runtime.service import answers, emits, handles, loops

logger = logging.getLogger(__name__)

REPORT_S = 10.0
TIDY_S = 10.0
SETTLE_S = 30.0
SETTLE_SOON_S = 1.0
ASK_S = 2.0
AFTER_S = 0.001


class NodeAgent:
    """One node's agent; it speaks and listens for its own node only."""

    def __init__(
        self,
        node: NodeName,
        *,
        gpus: Gpus,
        look_s: float,
        health_monitor: HealthMonitor,
        sharing_source: SharingConfigSource,
        instances: MigLayouts,
        dialects: Sequence[Dialect],
        paths: Paths,
        answering: AllocationHandler,
        turns: AdmissionWindow,
        plugins: Plugins,
        views: NodeViews,
        handshake: Reporting | None = None,
        record: Records,
        cleaning: Cleaning,
        cdi: Specifying,
        limiting: Limits,
        usage: Watching,
        clock: Clock,
    ) -> None:
        self.route = node
        self.gpus = gpus
        self.look_s = look_s
        self.checkup = health_monitor
        self.configuring = sharing_source
        self.instances = instances
        self.dialects = tuple(dialects)
        self.paths = paths
        self.leases = answering.finding.leases
        self.turns = turns
        self.answering = answering
        self.plugins = plugins
        self.views = views
        self.handshake = handshake
        self.record = record
        self.cleaning = cleaning
        self.cdi = cdi
        self.limiting = limiting
        self.limiting.changed = self._show_amounts
        self.usage = usage
        self.clock = clock
        self.devices: tuple[Device, ...] = ()
        self.host = NodeSoftware()
        self.shown = NodeAdvertisement()
        self.notes: tuple[str, ...] = ()
        self.trouble: str | None = "the GPUs were not asked yet"
        self._served: tuple[Device, ...] = ()
        self._report = asyncio.Event()
        self._settle_now = asyncio.Event()
        self._settled = False
        self._reported_at = 0.0

    # What it hears

    @handles
    async def note_leases(self, events: Sequence[LeaseChanged]) -> list[ShareActivated]:
        """Remember what the ledger says of this node's leases."""
        self.leases.observe(event.lease for event in events)
        self.instances.leases_changed()
        self.limiting.wake()
        return []

    @handles
    async def answer_listing(self, events: Sequence[ResyncRequested]) -> list[ShareActivated]:
        """Report everything again; what was told may have been lost."""
        self._report.set()
        self._settle_now.set()
        return []

    @answers
    async def end(self, event: TerminationRequest) -> TerminationReply:
        """Say which of the pods' last containers have ended, as the kubelet shows it."""
        ended = await self.answering.finding.terminated({event.pod, *event.more_pods})
        return TerminationReply(
            terminated=event.pod in ended,
            terminated_pods=tuple(p for p in event.more_pods if p in ended),
        )

    @answers
    async def may_bind(self, event: BindRequest) -> BindReply:
        """Say which pods must wait before they are bound to this node."""
        return self.turns.admit_binds(
            event.leases,
            self.answering.facts,
            self.plugins.unready_reason()
            or self.cleaning.unwritable_reason
            or self.cleaning.disk_pressure(),
            blind=self.answering.finding.pods.unreadable_reason,
        )

    @answers
    async def limit(self, event: LimitsRequest) -> LimitsReply:
        """Hold containers to their lease, or to a smaller one that it may become."""
        return await self.limiting.apply_request(event)

    async def leave(self) -> None:
        """Serve nobody new: say so, and wait until the kubelet has asked for all who come."""
        self.turns.draining = True
        self._report.set()
        await drained(self.route, self.turns, self.answering.finding.lease_requester, self.clock)

    # What it says

    @emits
    async def reports(self) -> AsyncIterator[Sequence[DeviceReported]]:
        """Report devices and allocations: on change, when asked, and every ten seconds."""
        while True:
            await set_within(self._report, REPORT_S)
            self._report.clear()
            if self.devices:
                yield [
                    DeviceReported(
                        node=self.route,
                        devices=self.devices,
                        served=() if self.turns.draining else tuple(self.shown.served),
                        allocations=self.record.allocations,
                        reported_at=self._now_at_last(),
                        pods_unreadable=bool(self.answering.finding.pods.unreadable_reason),
                    )
                ]

    def _now_at_last(self) -> float:
        """Return the time, later than at the last call: older reports are passed over."""
        self._reported_at = max(self.clock.now(), self._reported_at + AFTER_S)
        return self._reported_at

    @emits
    async def shares(self) -> AsyncIterator[Sequence[ShareActivated | ShareRefused]]:
        """Say what Allocate was answered with."""
        while True:
            yield await self.answering.outbox.take()

    @emits
    async def violations(self) -> AsyncIterator[Sequence[ViolationFound]]:
        """Say which rules containers break: when it is first seen, and every so often after."""
        while True:
            yield violation_events(await self.usage.violations(), self.route, self.clock.now())

    @emits
    async def health(self) -> AsyncIterator[Sequence[HealthChanged]]:
        """Say which devices are cordoned, and which are healthy again."""
        while True:
            yield await self.checkup.changes()

    # What it keeps doing

    @loops
    async def watch_usage(self) -> None:
        """Look at what containers use, and put limits back."""
        await self.usage.run()

    @loops
    async def keep_limits(self) -> None:
        """Keep containers to their leases when these change."""
        await self.limiting.run()

    @loops
    async def watch_gpus(self) -> None:
        """Look at the GPUs all the time; wait, and say so, while they cannot be asked."""
        while True:
            try:
                await self.look()
            except LeaseholdError as error:
                self._say(str(error))
            await self.clock.sleep(self.look_s)

    async def look(self) -> None:
        """Look at the GPUs once, and show what changed.

        Raises UnavailableError while they cannot be asked, RequestError for settings in vain.
        """
        sharing = await self.configuring.load()
        try:
            found = await self.gpus.discover()
        except UnavailableError as error:
            await self._take_silence(sharing, no_response(str(error)))
            raise
        self.checkup.update(found)
        host = NodeSoftware(
            driver_version=inventory.driver_version(found),
            isolation_available=await self.cleaning.can_isolate(),
        )
        sharing = sharing if host.isolation_available else without_isolation(sharing)
        try:
            await self.cdi.update(inventory.visible_gpus(found, sharing))
        except UnavailableError:
            if self.devices:  # they go on being looked after
                await self._take(found, sharing, host)
            raise
        await self._take(found, sharing, host)
        self._say(None)

    async def _take_silence(self, sharing: SharingConfig, why: Fault) -> None:
        """Nothing can be asked: what is known stays as it is, and sickens."""
        self.checkup.update((), why)
        if self.devices:
            devices = inventory.devices_of((), sharing, self.devices, self.checkup.faults)
            await self._show(devices, sharing, self.host)

    async def _take(self, found: Sequence[Gpu], sharing: SharingConfig, host: NodeSoftware) -> None:
        devices = inventory.devices_of(found, sharing, self.devices, self.checkup.faults)
        self.instances.update_devices(found, devices)
        for note in inventory.mode_warnings(found, sharing):
            if note not in self.notes:
                logger.warning(note)
        self.notes = inventory.mode_warnings(found, sharing)
        await self._show(devices, sharing, host)

    async def _show(
        self, devices: tuple[Device, ...], sharing: SharingConfig, host: NodeSoftware
    ) -> None:
        served = self.checkup.as_served(devices)
        before = (self.devices, self._served, self.host)
        if (devices, served, host) == before and self.answering.facts is not None:
            return
        shown = await asyncio.to_thread(
            advertisement_of, self.dialects, served, sharing.strategy, host
        )
        self._served = served
        self.devices, self.host, self.shown = devices, host, shown
        self.answering.facts = NodeSnapshot(
            name=self.route,
            devices={device.uuid: device for device in devices},
            served=shown.served,
            paths=self.paths,
            device_list_strategies=self.cdi.strategies,
        )
        self.plugins.serve(shown.served)
        self._show_amounts()
        self._report.set()

    def _show_amounts(self) -> None:
        """Have the node show what there is, and what pods ask for beyond what they have."""
        self.views.set_advertisement(self.shown.with_more(self.limiting.beyond))

    def _say(self, trouble: str | None) -> None:
        if trouble != self.trouble:
            if trouble is not None:
                logger.warning("no GPUs are served: %s", trouble)
            elif self.devices:
                logger.info("%d GPUs: %s", len(self.devices), inventory.count_models(self.devices))
        self.trouble = trouble

    @loops
    async def lay_out(self) -> None:
        """Partition devices in MIG mode as leases want it."""
        await self.instances.run()

    @loops
    async def serve_kubelet(self) -> None:
        """Keep the device plugins registered."""
        await self.plugins.run()

    @loops
    async def watch_kubelet(self) -> None:
        """See whether the kubelet's list of pods can be read, and the disk be written to."""
        before = ""
        while True:
            await self.cleaning.probe_disk()
            try:
                await self.answering.finding.pods.list_pods()
            except UnavailableError as error:
                logger.debug("the kubelet's pods are not known: %s", error)
            blind = self.answering.finding.pods.unreadable_reason
            if bool(blind) != bool(before):
                self._report.set()
            before = blind
            await self.clock.sleep(TIDY_S)

    @loops
    async def keep_views(self) -> None:
        """Keep the node's and the pods' views."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.views.run())
            if self.handshake is not None:
                group.create_task(self.handshake.run())

    @loops
    async def settle_leases(self) -> None:
        """Ask for all leases of the node now and then: news may be lost."""
        pause_s = 0.0
        while True:
            await set_within(self._settle_now, pause_s)
            self._settle_now.clear()
            pause_s = SETTLE_S if await self._settle() else SETTLE_SOON_S

    async def _settle(self) -> bool:
        asked_at = self.leases.revision
        try:
            told = await self.answering.finding.lease_requester.request(
                LeasesRequest(node=self.route), LeasesReply, timeout_s=ASK_S
            )
        except UnavailableError as error:
            logger.debug("the node's leases are not told: %s", error)
            return False
        self.leases.sync(told.leases, since=asked_at)
        self.instances.leases_changed()
        self.limiting.wake()
        self._settled = True
        if self.record.lost and self.answering.facts is not None:
            await rebuild_record(
                self.record,
                self.answering.facts,
                self.leases.leases,
                finding=self.answering.finding,
                instances=self.instances,
                now=self.clock.now(),
            )
            self._report.set()
        return not self.record.lost

    @loops
    async def tidy(self) -> None:
        """Forget pods that are gone, and remove what was made for them.

        Not before the ledger has told which leases live: a kubelet that has just started shows
        nothing of pods that run.
        """
        while True:
            await self.clock.sleep(TIDY_S)
            if not self._settled:
                continue
            pods = await self.answering.finding.pods.list_pods()
            held = await self.answering.finding.pod_resources.list_holdings()
            gone = ended_pods(self.record.allocations, pods, held, self.leases.leases)
            await self.record.forget(gone)
            self.answering.refused &= {pod.uid for pod in pods if not pod.terminal}
            live = {pod.uid for pod in pods} | self.record.pods | set(self.leases.leases)
            mounts = (mount for entry in self.record.entries for mount in entry.setup.mounts)
            mounted = {mount.host_path for mount in mounts}
            await self.cleaning.remove_unused(live, None if self.record.lost else mounted)
