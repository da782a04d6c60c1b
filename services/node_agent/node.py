"""A node: what all parts of its agent know, and the clients that they use."""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from services.node_agent.agent_timing import DEFAULT_TIMING, AgentTiming
from services.node_agent.allocate.allocation import NodeSnapshot
from services.node_agent.allocate.cdi_files import CdiFiles
from services.node_agent.enforcers.table import Enforcers
from services.node_agent.isolation.container_files import ContainerFiles
from services.node_agent.kubelet.pod_list import KubeletPods
from services.node_agent.kubelet.pod_resources import KubeletPodResources
from services.node_agent.metrics import AgentMetrics
from services.node_agent.records.checkpoint import Checkpoint
from services.node_agent.records.known_leases import KnownLeases
from services.node_agent.records.lease_sync import LeaseSync
from services.node_agent.views.advertisement import NodeAdvertisement
from shared.dialects.advertised import NodeSoftware
from shared.kubernetes.client import KubernetesClient
from shared.model.bounds import cut
from shared.model.clock import Clock, SystemClock, until_tick
from shared.model.devices.device import Device, UnreadDevice
from shared.model.errors import UnavailableError
from shared.model.events.node_events import ShareActivated, ShareRefused
from shared.model.names import DeviceUuid, NodeName, PodUid

MAX_EVENTS = 4096


class Outbox:
    """Beyond `MAX_EVENTS` the oldest are dropped, as device reports have the same allocations."""

    def __init__(self) -> None:
        self._events: deque[ShareActivated | ShareRefused] = deque(maxlen=MAX_EVENTS)
        self._added = asyncio.Event()

    def add(self, event: ShareActivated | ShareRefused) -> None:
        self._events.append(event)
        self._added.set()

    async def take(self) -> list[ShareActivated | ShareRefused]:
        await self._added.wait()
        self._added.clear()
        events = list(self._events)
        self._events.clear()
        return events


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    name: NodeName
    kubernetes: KubernetesClient
    kubelet: KubeletPods
    pod_resources: KubeletPodResources
    checkpoint: Checkpoint
    lease_sync: LeaseSync
    files: ContainerFiles
    enforcers: Enforcers
    cdi: CdiFiles
    metrics: AgentMetrics
    clock: Clock = field(default_factory=SystemClock)
    timing: AgentTiming = DEFAULT_TIMING
    software: NodeSoftware = field(default_factory=NodeSoftware)
    shown: NodeAdvertisement = field(default_factory=NodeAdvertisement)
    snapshot: NodeSnapshot | None = None
    """None until the devices are known: nothing is served before that."""
    unread: tuple[UnreadDevice, ...] = ()
    report_due: asyncio.Event = field(default_factory=asyncio.Event)
    compare_due: asyncio.Event = field(default_factory=asyncio.Event)
    """Compare the records with the leases without delay."""
    audit_due: asyncio.Event = field(default_factory=asyncio.Event)
    """Compare limits with the leases without delay: they may be gone."""
    on_devices: list[Callable[[], None]] = field(default_factory=list)
    config_errors: list[str] = field(default_factory=list)
    outbox: Outbox = field(default_factory=Outbox)
    refused: set[PodUid] = field(default_factory=set)
    """Refused pods that got nothing since, and terminal ones with leases: the kubelet requests
    nothing for them."""
    laid_out: dict[DeviceUuid, str] = field(default_factory=dict)
    layout_faults: dict[DeviceUuid, str] = field(default_factory=dict)
    grant_faults: dict[DeviceUuid, str] = field(default_factory=dict)
    unproven: bool = False
    """The kubelet has registered the resources anew, and nothing was given since."""
    unresolved_reason: str = ""

    @property
    def closed(self) -> dict[DeviceUuid, str]:
        return {**self.grant_faults, **self.layout_faults, **self.enforcers.faults}

    api_away_at: float = -math.inf
    """By the clock's ticks."""

    @property
    def leases(self) -> KnownLeases:
        return self.lease_sync.leases

    @property
    def devices(self) -> tuple[Device, ...]:
        return () if self.snapshot is None else tuple(self.snapshot.devices.values())

    def require_snapshot(self) -> NodeSnapshot:
        if self.snapshot is None:
            raise UnavailableError("the node agent does not know its devices yet")
        return self.snapshot

    async def wait(self, event: asyncio.Event, every_s: float) -> None:
        waiting = asyncio.create_task(event.wait())
        sleeping = asyncio.create_task(self.clock.sleep(until_tick(every_s)))
        try:
            await asyncio.wait({waiting, sleeping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            sleeping.cancel()
        event.clear()

    def take_config_errors(self) -> str:
        errors = cut("; ".join(self.config_errors))
        self.config_errors.clear()
        return errors

    def update(
        self, snapshot: NodeSnapshot, software: NodeSoftware, shown: NodeAdvertisement
    ) -> None:
        self.snapshot = snapshot
        self.software = software
        self.shown = shown
        self.report_due.set()
        for notify in self.on_devices:
            notify()
