"""Devices and their shares, as the API returns them; pure.

Amounts are MiB, percent of one device and Unix seconds. Of a namespace that the viewer may not see,
a share has its amounts and the state of its lease: no names, times or usage.
"""

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from typing import Literal

import msgspec

from shared.model.devices.device import Hardware, Leftover
from shared.model.devices.enforcers import (
    NOTHING_OFFERED,
    ComputeEnforcer,
    MemoryEnforcer,
    MissingEnforcer,
    Offer,
    SharingMode,
)
from shared.model.devices.replicas import Replicas
from shared.model.leases.lease import MigPlacement, ShareSize
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.quantity import timestamp
from shared.model.views.view import View


class MeasuredView(View, frozen=True, kw_only=True):
    """The usage of a share, as the agent of its node measured it last."""

    memory_mib: int | None = None
    cores_percent: int | None = None
    processes: int = 0
    idle: bool = False
    """Not used for longer than the request's `idle_after_s`."""
    idle_since: float | None = None
    held_memory_mib: int | None = None
    """What its enforcers hold it to, as read back; None where there is nothing to read."""
    held_cores_percent: int | None = None
    held_difference: str = ""
    read_back_at: float = 0.0


class ShareView(View, frozen=True, kw_only=True):
    """One container's share of one device."""

    container: str = ""
    device: DeviceUuid
    index: int
    device_mib: int
    memory_mib: int
    cores_percent: int
    booked_cores: int
    whole: bool = False
    slot: int | None = None
    mig: MigPlacement | None = None
    fence: int = 0
    init: bool = False
    share_id: str = ""
    memory: MemoryEnforcer = "hami-core"
    compute: ComputeEnforcer = "hami-core"
    held_text: str = ""
    requested_size: ShareSize | None = None
    measured: MeasuredView | None = None


class HeldShare(ShareView, frozen=True, kw_only=True):
    """A share of a device, with the lease that holds it."""

    state: str
    pod: PodUid = PodUid("")
    namespace: Namespace = Namespace("")
    """Empty if the viewer may not see it."""
    name: str = ""
    claim: bool = False
    created_at: float = 0.0
    expires_at: float = 0.0
    dialect: str = msgspec.field(name="system", default="")
    gang: str = ""
    version: int = 0


class DeviceReservation(View, frozen=True, kw_only=True):
    """What free room of a device is kept for."""

    namespace: Namespace = Namespace("")
    """Empty if the viewer may not see it, or if it is not known."""
    name: str = ""
    until: float | None = None
    """Unix seconds of its planned start; None if it preempts others."""

    @property
    def text(self) -> str:
        pod = f"{self.namespace}/{self.name}" if self.name else "another pod"
        return f"reserved for {pod}" + (f" until {timestamp(self.until)}" if self.until else "")


class DevicePhase(StrEnum):
    """What a device is to new pods; the first that applies."""

    UNHEALTHY = "Unhealthy"
    CLOSED = "Closed"
    """It, or its node, is cordoned, or the node is gone."""
    RESERVED = "Reserved"
    LEASED = "Leased"
    FREE = "Free"


class DeviceView(View, frozen=True, kw_only=True):
    """One device, its use, and its shares in the order of their slots."""

    uuid: DeviceUuid
    node: NodeName
    index: int
    model: str
    mode: str
    healthy: bool
    fault: str
    """Empty also if it names a pod that the viewer may not see."""
    excluded: str
    """Why annotations of the node close it to new shares."""
    memory_mib: int
    unit_mib: int
    used_memory_mib: int
    used_cores_percent: int
    slots: int
    used_shares: int
    fence: int
    sharing_mode: SharingMode | Literal[""] = ""
    offer: Offer = NOTHING_OFFERED
    missing: tuple[MissingEnforcer, ...] = ()
    replicas: Replicas | None = None
    """None: it is offered by amounts, or by MIG instances."""
    layout: str
    instances: str
    layouts: int
    numa: int | None
    leftovers: tuple[Leftover, ...] = ()
    """Without the names that the viewer may not see."""
    shares: tuple[HeldShare, ...] = ()
    reservation: DeviceReservation | None = None
    phase: DevicePhase = DevicePhase.FREE
    milli_gpu: int = 0
    """Of each pod the larger part of the device's memory or cores."""
    idle_milli_gpu: int = 0
    """Of pods all of whose shares of the device are idle."""


class DeviceDetails(DeviceView, frozen=True, kw_only=True):
    """One device, with what its sensors read."""

    hardware: Hardware | None = None


class NodeDevices(View, frozen=True, kw_only=True):
    """A node with its devices, in the order of their indices."""

    node: NodeName
    cordoned: str = ""
    unschedulable: bool = False
    devices: tuple[DeviceDetails, ...] = ()


class GpuTotals(View, frozen=True, kw_only=True):
    """How many devices there are by phase, and how much of them is leased and idle, in GPUs."""

    gpus: int = 0
    phases: dict[DevicePhase, int] = msgspec.field(default_factory=dict)
    leased: float = 0.0
    idle: float = 0.0

    @classmethod
    def of(cls, devices: Iterable[DeviceView]) -> "GpuTotals":
        views = tuple(devices)
        return cls(
            gpus=len(views),
            phases=dict(Counter(view.phase for view in views)),
            leased=sum(view.milli_gpu for view in views) / 1000,
            idle=sum(view.idle_milli_gpu for view in views) / 1000,
        )

    @property
    def text(self) -> str:
        """For example, `8 GPUs: 5 Leased, 3 Free; 3.25 GPUs leased, 1 of them idle`."""
        plural = "" if self.gpus == 1 else "s"
        phases = ", ".join(
            f"{self.phases[phase]} {phase}" for phase in DevicePhase if phase in self.phases
        )
        idle = f", {self.idle:.2f} of them idle" if self.idle else ""
        return f"{self.gpus} GPU{plural}: {phases}; {self.leased:.2f} GPUs leased{idle}"


class GpusView(View, frozen=True, kw_only=True):
    """Every device and its shares."""

    read_at: float
    nodes: tuple[NodeDevices, ...] = ()
    unmeasured_nodes: tuple[NodeName, ...] = ()
    problems: tuple[str, ...] = ()
