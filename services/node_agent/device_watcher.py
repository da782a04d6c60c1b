"""Discovers the node's GPUs periodically, and advertises changes.

The kubelet receives them as lists of device plugins, Kubernetes in the node's status, and the
ledger in device reports.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from services.node_agent.allocate.allocation import NodeSnapshot
from services.node_agent.allocate.cdi_files import CdiFiles
from services.node_agent.gpus import inventory
from services.node_agent.gpus.device_faults import Fault, no_response
from services.node_agent.gpus.health_monitor import HealthMonitor
from services.node_agent.gpus.inventory import Gpu
from services.node_agent.gpus.sharing_config import SharingConfig, without_isolation
from services.node_agent.node_state import AgentNodeState
from services.node_agent.records.checkpoint import Checkpoint
from services.node_agent.records.held_devices import devices_of_records, held_slots
from services.node_agent.records.known_leases import KnownLeases
from services.node_agent.resize.limits import excess_requests
from services.node_agent.views.advertisement import NodeAdvertisement, advertisement_of
from shared.dialects.advertised import NodeSoftware, PluginDeviceId
from shared.dialects.dialect import Dialect, Paths
from shared.model.clock import until_tick
from shared.model.device import Device
from shared.model.errors import LeaseholdError, UnavailableError
from shared.model.names import DeviceUuid, NodeName

logger = logging.getLogger(__name__)


ServeResources = Callable[
    [Mapping[str, Mapping[str, PluginDeviceId]], Mapping[str, frozenset[str]]], None
]


class DeviceWatcher:
    """The GPUs of one node."""

    def __init__(
        self,
        node: NodeName,
        *,
        state: AgentNodeState,
        discover: Callable[[], Awaitable[tuple[Gpu, ...]]],
        read_sharing_config: Callable[[], Awaitable[SharingConfig]],
        health: HealthMonitor,
        observe_mig: Callable[[Sequence[Gpu], Sequence[Device]], None],
        update_library: Callable[[], Awaitable[bool]],
        cdi: CdiFiles,
        dialects: Sequence[Dialect],
        get_paths: Callable[[], Paths],
        checkpoint: Checkpoint,
        leases: KnownLeases,
        serve: ServeResources,
        advertise: Callable[[NodeAdvertisement], None],
        probe_s: float,
    ) -> None:
        self.node = node
        self.state = state
        self.discover = discover
        """Returns all GPUs; raises UnavailableError while the driver does not respond."""
        self.read_sharing_config = read_sharing_config
        self.health = health
        self.observe_mig = observe_mig
        self.update_library = update_library
        """Installs the library if it has changed; returns whether limits can be enforced."""
        self.cdi = cdi
        self.dialects = tuple(dialects)
        self.get_paths = get_paths
        self.checkpoint = checkpoint
        self.leases = leases
        self.serve = serve
        """Serves these lists from the device plugins; the amounts are requested beside them."""
        self.advertise = advertise
        """Writes this to the node's status and annotations."""
        self.probe_s = probe_s
        self._served: tuple[Device, ...] = ()
        self._warnings: tuple[str, ...] = ()
        self._observed: object = None
        """What the devices that are advertised were derived from; None: they must be again."""
        self._remembered: tuple[Device, ...] | None = None
        """The devices of the agent's earlier run; None: no probe has succeeded yet."""
        self._unready_reason: str | None = "the GPUs have not been discovered yet"

    def unready_reason(self) -> str | None:
        """Return why no GPUs are served; None: they are."""
        return self._unready_reason

    async def run(self) -> None:
        """Probe the GPUs until cancelled; log why, and wait, while they do not respond."""
        while True:
            try:
                await self.probe()
            except LeaseholdError as error:
                self._set_unready(str(error))
            await asyncio.sleep(until_tick(self.probe_s))

    async def probe(self) -> None:
        """Probe the GPUs once, and advertise changes.

        Raises UnavailableError while they do not respond, RequestError for invalid settings.
        """
        config = await self.read_sharing_config()
        try:
            gpus = await self.discover()
        except UnavailableError as error:
            await self._mark_silent(config, no_response(str(error)))
            raise
        if self._remembered is None:
            self._remembered = self._recorded(config)
            self.health.remember(self._remembered)
        self.health.update(gpus)
        software = NodeSoftware(
            driver_version=inventory.driver_version(gpus),
            isolation_available=await self.update_library(),
        )
        config = config if software.isolation_available else without_isolation(config)
        try:
            await self.cdi.update(inventory.visible_gpus(gpus, config))
        except UnavailableError:
            if self.state.devices:  # their health and MIG layouts are still watched
                await self._observe(gpus, config, software)
            raise
        await self._observe(gpus, config, software)
        self._set_unready(None)
        await self._record()

    def _recorded(self, config: SharingConfig) -> tuple[Device, ...]:
        """Return the devices that the checkpoint knows."""
        given = devices_of_records(self.checkpoint.entries, config.split_count)
        known = {device.uuid: device for device in (*given, *self.checkpoint.devices)}
        return tuple(known.values())

    async def _record(self) -> None:
        try:
            await self.checkpoint.record_devices(self.state.devices)
        except UnavailableError as error:  # allocations are refused meanwhile
            logger.debug("the devices are not recorded: %s", error)

    def _held(self) -> Mapping[DeviceUuid, int] | None:
        """Return what is held of the devices; None: it is not known."""
        if self.checkpoint.lost or not self.leases.synced:
            return None
        return held_slots(self.checkpoint.entries, self.leases.leases.values())

    async def _mark_silent(self, config: SharingConfig, fault: Fault) -> None:
        """Mark the known devices as unhealthy: the driver does not respond."""
        self.health.update((), fault)
        self._observed = None
        if self.state.devices:
            known = self.state.devices
            present = {device.uuid for device in known} - self.state.absent
            devices = inventory.devices_of((), config, known, self.health.faults)
            await self._advertise(devices, config, self.state.software, present)

    async def _observe(
        self, gpus: Sequence[Gpu], config: SharingConfig, software: NodeSoftware
    ) -> None:
        held = self._held()
        observed = (gpus, config, software, self.health.faults, self.get_paths(), held)
        if observed == self._observed:
            return
        known = self.state.devices or self._remembered or ()
        devices = inventory.devices_of(gpus, config, known, self.health.faults, held)
        removed = {each.uuid for each in known}.difference(each.uuid for each in devices)
        self.health.forget(removed.difference(gpu.uuid for gpu in gpus))
        self.observe_mig(gpus, devices)
        warnings = inventory.mode_warnings(gpus, config)
        for warning in warnings:
            if warning not in self._warnings:
                logger.warning(warning)
        self._warnings = warnings
        await self._advertise(devices, config, software, {gpu.uuid for gpu in gpus})
        self._observed = observed

    async def _advertise(
        self,
        devices: tuple[Device, ...],
        config: SharingConfig,
        software: NodeSoftware,
        present: AbstractSet[DeviceUuid],
    ) -> None:
        """Advertise the devices, of which the driver lists those that are present."""
        served = self.health.as_served(devices)
        paths, known = self.get_paths(), self.state.snapshot
        before = (self.state.devices, self._served, self.state.software)
        if (devices, served, software) == before and known is not None and known.paths == paths:
            return
        shown = await asyncio.to_thread(
            advertisement_of, self.dialects, served, config.strategy, software
        )
        self._served = served
        snapshot = NodeSnapshot(
            name=self.node,
            devices={device.uuid: device for device in devices},
            served=shown.served,
            paths=paths,
            device_list_strategies=self.cdi.strategies,
            absent=frozenset(
                device.uuid
                for device in served
                if not device.healthy and device.uuid not in present
            ),
        )
        self.state.update(devices, software, shown=shown, snapshot=snapshot)
        self.serve(shown.served, shown.amounts)
        self.advertise_amounts()

    def advertise_amounts(self) -> None:
        """Advertise the node's amounts, with what pods request beyond their current shares."""
        self.advertise(self.state.shown.with_more(excess_requests(self.checkpoint.entries)))

    def _set_unready(self, reason: str | None) -> None:
        if reason != self._unready_reason:
            if reason is not None:
                logger.warning("no GPUs are served: %s", reason)
            elif self.state.devices:
                models = inventory.count_models(self.state.devices)
                logger.info("%d GPUs: %s", len(self.state.devices), models)
        self._unready_reason = reason
