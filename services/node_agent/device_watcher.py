"""Discovers the node's GPUs periodically, and advertises changes to kubelet, node and ledger."""

import asyncio
import logging
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from services.node_agent.allocate.admission_window import AdmissionWindow
from services.node_agent.allocate.allocation import NodeSnapshot
from services.node_agent.device_config import DeviceConfigLoader
from services.node_agent.gpus import inventory
from services.node_agent.gpus.device_faults import Fault, no_response
from services.node_agent.gpus.driver import GpuDiscovery
from services.node_agent.gpus.health_monitor import HealthMonitor
from services.node_agent.gpus.inventory import Gpu, SharingConfig
from services.node_agent.kubelet.registration import DevicePlugins
from services.node_agent.node import Node
from services.node_agent.offered_mode import OfferedMode
from services.node_agent.partition.layout_reconciler import LayoutReconciler
from services.node_agent.records.device_guard import held_slots
from services.node_agent.resize.limits import excess_requests
from services.node_agent.views.advertisement import advertisement_of
from services.node_agent.views.node_views import ViewWriter
from shared.dialects.advertised import NodeSoftware
from shared.dialects.dialect import Dialect
from shared.model.clock import until_tick
from shared.model.devices.device import Device, UnreadDevice
from shared.model.errors import LeaseholdError, UnavailableError
from shared.model.names import DeviceUuid

logger = logging.getLogger(__name__)

PROBE_S = 5.0
"""Interval of probes of devices: a fault is noticed this late, at most."""


class DeviceWatcher:
    def __init__(
        self,
        node: Node,
        *,
        driver: GpuDiscovery,
        config: DeviceConfigLoader,
        health: HealthMonitor,
        mig: LayoutReconciler,
        window: AdmissionWindow,
        dialects: Sequence[Dialect],
        plugins: DevicePlugins,
        views: ViewWriter,
    ) -> None:
        self.node = node
        self.driver = driver
        self.config = config
        self.health = health
        self.mig = mig
        self.window = window
        self.dialects = tuple(dialects)
        self.plugins = plugins
        self.views = views
        self._served: tuple[Device, ...] = ()
        self._warnings: tuple[str, ...] = ()
        self.mode = OfferedMode(node, window)
        self._remembered: tuple[Device, ...] | None = None
        self._responding: AbstractSet[DeviceUuid] = frozenset()
        self._unready_reason: str | None = "the GPUs have not been discovered yet"

    def unready_reason(self) -> str | None:
        return self._unready_reason

    async def run(self) -> None:
        while True:
            try:
                await self.probe()
            except LeaseholdError as error:
                self._set_unready(str(error))
            await self.node.clock.sleep(until_tick(PROBE_S))

    async def probe(self) -> None:
        """Raises UnavailableError while GPUs do not respond, RequestError for invalid settings."""
        config = await self.config.load()
        try:
            gpus = await self.driver.discover()
        except UnavailableError as error:
            self._responding = frozenset()
            await self._mark_silent(config, no_response(str(error)))
            raise
        if self._remembered is None:
            self._remembered = self.node.checkpoint.devices
            self.health.remember(self._remembered)
        self.health.update(gpus, self.driver.unreadable, self.driver.unread)
        software = NodeSoftware(
            driver_version=inventory.driver_version(gpus),
            isolation_available=await self.node.files.library.update(),
        )
        await self.node.enforcers.find_out(gpus)
        self._note_responding({gpu.uuid for gpu in gpus if not gpu.fault})
        try:
            await self.node.cdi.update(inventory.visible_gpus(gpus, config))
        except UnavailableError:
            if self.node.devices:  # their health and MIG layouts are still watched
                await self._observe(gpus, config, software)
            raise
        await self._observe(gpus, config, software)
        self._set_unready(None)
        await self.record_devices()

    async def record_devices(self) -> None:
        try:
            await self.node.checkpoint.record_devices(self.node.devices)
        except UnavailableError as error:  # allocations are refused meanwhile
            logger.debug("the devices are not recorded: %s", error)

    async def _mark_silent(self, config: SharingConfig, fault: Fault) -> None:
        self.health.update((), driver_fault=fault)
        snapshot = self.node.snapshot
        if snapshot is not None and snapshot.devices:
            before = self.node.devices
            present = snapshot.devices.keys() - snapshot.absent
            config = self.mode.in_force(config)
            devices = inventory.devices_of((), config, before, self.health.faults)
            await self._advertise(devices, config, self.node.software, present)

    async def _observe(
        self, gpus: Sequence[Gpu], config: SharingConfig, software: NodeSoftware
    ) -> None:
        before = self.node.devices or self._remembered or ()
        checkpoint = self.node.checkpoint
        leases = self.node.leases
        held = None  # is not known
        if leases.synced and not checkpoint.lost:
            held = held_slots(checkpoint.entries, leases.leases.values())
        config = await self.mode.choose(config, gpus, before)
        devices = inventory.devices_of(gpus, config, before, self.health.faults, held)
        devices = self.node.enforcers.offered(devices, gpus, config)
        removed = {device.uuid for device in before}.difference(device.uuid for device in devices)
        self.health.forget(removed.difference(gpu.uuid for gpu in gpus))
        self._note_unread(inventory.unread_devices(self.driver.unread, devices, config))
        self.mig.profiles = {gpu.uuid: gpu.mig.profiles for gpu in gpus if gpu.mig is not None}
        warnings = inventory.mode_warnings(gpus, config)
        for warning in warnings:
            if warning not in self._warnings:
                logger.warning(warning)
        self._warnings = warnings
        await self._advertise(devices, config, software, {gpu.uuid for gpu in gpus})

    def _note_responding(self, responding: AbstractSet[DeviceUuid]) -> None:
        """A GPU's driver may have been loaded anew: limits are read back."""
        if responding - self._responding:
            self.node.audit_due.set()
        self._responding = responding

    def _note_unread(self, unread: tuple[UnreadDevice, ...]) -> None:
        for gpu in unread:
            if gpu not in self.node.unread:
                logger.warning("GPU %s is not served: %s", gpu.uuid or "without UUID", gpu.reason)
        if unread != self.node.unread:
            self.node.unread = unread
            self.node.report_due.set()

    async def _advertise(
        self,
        devices: tuple[Device, ...],
        config: SharingConfig,
        software: NodeSoftware,
        present: AbstractSet[DeviceUuid],
    ) -> None:
        served = self.health.as_served(devices)
        problem = self.mode.problem
        now = (devices, served, software, self.node.files.paths, self.node.cdi.strategies, problem)
        snapshot_before = self.node.snapshot
        if snapshot_before is not None and now == (
            *(self.node.devices, self._served, self.node.software),
            *(snapshot_before.paths, snapshot_before.device_list_strategies),
            self.node.shown.sharing_problem,
        ):
            return
        shown = await asyncio.to_thread(
            advertisement_of, self.dialects, served, config.strategy, software
        )
        if not self.mode.advertise(config.replicas):
            return
        shown = replace(shown, sharing_problem=problem)
        self._served = served
        snapshot = NodeSnapshot(
            name=self.node.name,
            devices={device.uuid: device for device in devices},
            served=shown.served,
            paths=self.node.files.paths,
            device_list_strategies=self.node.cdi.strategies,
            absent=frozenset(
                device.uuid
                for device in served
                if not device.healthy and device.uuid not in present
            ),
        )
        self.node.update(snapshot, software, shown)
        self.plugins.serve(shown.served, shown.amounts)
        self.advertise_amounts()

    def advertise_amounts(self) -> None:
        shown = self.node.shown.with_more(excess_requests(self.node.checkpoint.entries))
        if self.node.snapshot is not None and shown != self.views.advertisement:
            self.views.set_advertisement(shown)

    def _set_unready(self, reason: str | None) -> None:
        if reason != self._unready_reason:
            if reason is not None:
                logger.warning("no GPUs are served: %s", reason)
            elif self.node.devices:
                models = inventory.count_models(self.node.devices)
                logger.info("%d GPUs: %s", len(self.node.devices), models)
        self._unready_reason = reason
