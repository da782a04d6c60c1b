"""Discovers the node's GPUs periodically, and advertises changes.

The kubelet receives them as lists of device plugins, Kubernetes in the node's status, and the
ledger in device reports.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from services.node_agent.allocate.allocation import NodeSnapshot
from services.node_agent.allocate.cdi_files import CdiFiles
from services.node_agent.gpus import inventory
from services.node_agent.gpus.device_faults import Fault, no_response
from services.node_agent.gpus.health_monitor import HealthMonitor
from services.node_agent.gpus.inventory import Gpu
from services.node_agent.gpus.sharing_config import SharingConfig, without_isolation
from services.node_agent.node_state import AgentNodeState
from services.node_agent.records.checkpoint import Checkpoint
from services.node_agent.resize.limits import excess_requests
from services.node_agent.views.advertisement import NodeAdvertisement, advertisement_of
from shared.dialects.advertised import NodeSoftware, PluginDeviceId
from shared.dialects.dialect import Dialect, Paths
from shared.model.clock import until_tick
from shared.model.device import Device
from shared.model.errors import LeaseholdError, UnavailableError
from shared.model.names import NodeName

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
        self.serve = serve
        """Serves these lists from the device plugins; the amounts are requested beside them."""
        self.advertise = advertise
        """Writes this to the node's status and annotations."""
        self.probe_s = probe_s
        self._served: tuple[Device, ...] = ()
        self._warnings: tuple[str, ...] = ()
        self._observed: object = None
        """What the devices that are advertised were derived from; None: they must be again."""
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

    async def _mark_silent(self, config: SharingConfig, fault: Fault) -> None:
        """Mark the known devices as unhealthy: the driver does not respond."""
        self.health.update((), fault)
        self._observed = None
        if self.state.devices:
            known = self.state.devices
            devices = inventory.devices_of((), config, known, self.health.faults)
            await self._advertise(devices, config, self.state.software)

    async def _observe(
        self, gpus: Sequence[Gpu], config: SharingConfig, software: NodeSoftware
    ) -> None:
        observed = (gpus, config, software, self.health.faults, self.get_paths())
        if observed == self._observed:
            return
        devices = inventory.devices_of(gpus, config, self.state.devices, self.health.faults)
        self.observe_mig(gpus, devices)
        warnings = inventory.mode_warnings(gpus, config)
        for warning in warnings:
            if warning not in self._warnings:
                logger.warning(warning)
        self._warnings = warnings
        await self._advertise(devices, config, software)
        self._observed = observed

    async def _advertise(
        self, devices: tuple[Device, ...], config: SharingConfig, software: NodeSoftware
    ) -> None:
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
