"""The DRA driver of one node: its slices, its sockets for the kubelet, and the devices' health."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from services.node_agent.dra.kubelet_retries import KubeletRetries
from services.node_agent.dra.preparation import ClaimPreparation
from services.node_agent.dra.slice_writer import SliceWriter
from services.node_agent.kubelet.claim_plugin import ClaimDeviceHealth, ClaimPlugin
from shared.model.claim import DRIVER, claimable
from shared.model.clock import Clock, wait_for_event
from shared.model.device import Device
from shared.model.names import NodeName


class ClaimDriver:
    """All of it; `get_devices` returns the devices as last discovered."""

    def __init__(
        self,
        node: NodeName,
        kubelet_directory: Path,
        *,
        preparation: ClaimPreparation,
        slices: SliceWriter,
        retries: KubeletRetries,
        get_devices: Callable[[], Sequence[Device]],
        clock: Clock,
    ) -> None:
        self.preparation = preparation
        self.slices = slices
        self.retries = retries
        self.get_devices = get_devices
        self.clock = clock
        self.plugin = ClaimPlugin(
            DRIVER,
            node,
            kubelet_directory,
            handler=preparation,
            health_source=self,
            on_registered=slices.write_anew,
        )
        self._devices_changed = asyncio.Event()

    async def run(self) -> None:
        """Serve until cancelled."""
        await self.preparation.restore()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.slices.run())
            group.create_task(self.plugin.run())
            group.create_task(self.retries.run())

    def unready_reason(self) -> str | None:
        """Return why claims cannot be allocated here; None: they can."""
        reasons = (self.slices.unwritten_reason, self.plugin.unregistered_reason)
        return "; ".join(filter(None, reasons)) or None

    def update_devices(self) -> None:
        """Write the slices soon, and report the health of devices at once."""
        self.slices.request()
        self._devices_changed.set()
        self._devices_changed = asyncio.Event()

    def device_health(self) -> Sequence[ClaimDeviceHealth]:
        """Return the health of every device and instance."""
        now = self.clock.now()
        return [
            ClaimDeviceHealth(
                device=name,
                healthy=device.healthy,
                message="" if device.healthy else device.health_text,
                checked_at=now,
            )
            for device in self.get_devices()
            for name in claimable(device)
        ]

    async def wait_for_change(self, timeout_s: float) -> None:
        """Wait until a device has changed, at most for this time."""
        await wait_for_event(self._devices_changed, timeout_s)
