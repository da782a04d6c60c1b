"""The current state of the node's devices, shared by the agent's parts."""

import asyncio
from collections.abc import Callable

from services.node_agent.allocate.allocation import NodeSnapshot
from services.node_agent.views.advertisement import NodeAdvertisement
from shared.dialects.advertised import NodeSoftware
from shared.model.bounds import cut
from shared.model.device import Device
from shared.model.errors import UnavailableError
from shared.model.names import DeviceUuid


class AgentNodeState:
    """The devices as last discovered, and what is advertised of them."""

    def __init__(self) -> None:
        self.devices: tuple[Device, ...] = ()
        self.software = NodeSoftware()
        self.shown = NodeAdvertisement()
        self.snapshot: NodeSnapshot | None = None
        """None until the devices are known: nothing is served before that."""
        self.report_due = asyncio.Event()
        """Set when a device report must be sent without delay."""
        self.observers: list[Callable[[], None]] = []
        """Called after each change of the devices."""
        self.config_errors: list[str] = []
        """Of device configurations, until they are reported."""

    def get_snapshot(self) -> NodeSnapshot | None:
        """Return the snapshot for allocations; None until the devices are known."""
        return self.snapshot

    @property
    def absent(self) -> frozenset[DeviceUuid]:
        """Devices that the driver no longer lists."""
        return frozenset() if self.snapshot is None else self.snapshot.absent

    def require_snapshot(self) -> NodeSnapshot:
        """Return the snapshot for allocations. Raises UnavailableError until it is known."""
        if self.snapshot is None:
            raise UnavailableError("the node agent does not know its devices yet")
        return self.snapshot

    def take_config_errors(self) -> str:
        """Return the errors that were not reported yet."""
        errors = cut("; ".join(self.config_errors))
        self.config_errors.clear()
        return errors

    def update(
        self,
        devices: tuple[Device, ...],
        software: NodeSoftware,
        *,
        shown: NodeAdvertisement,
        snapshot: NodeSnapshot,
    ) -> None:
        """Set newly discovered devices; a report is due."""
        self.devices, self.software = devices, software
        self.shown, self.snapshot = shown, snapshot
        self.report_due.set()
        for observe in self.observers:
            observe()
