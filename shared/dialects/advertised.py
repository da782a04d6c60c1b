"""What a node advertises; pure."""

import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.model.devices.device import Device, DeviceMode
from shared.model.names import DeviceUuid

TRIGGER = "leasehold.dev/share"
"""For dialects whose resources the kubelet does not allocate."""
TRIGGERS = 100
"""The most shares of a device."""
NumaNodes = tuple[int, ...]
_DIGITS = string.digits + string.ascii_lowercase


class Strategy:
    """How Volcano gpushare's resources are advertised: `--gpu-strategy`, with `auto` added."""

    AUTO = "auto"
    SHARE = "share"
    NUMBER = "number"
    ALL = (AUTO, SHARE, NUMBER)


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginDeviceId:
    """At most 63 characters, never reused."""

    id: str
    healthy: bool
    device: DeviceUuid | None = None
    """None if the ID is good for any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSoftware:
    driver_version: str = ""
    """Empty if it is unknown."""
    isolation_available: bool = False
    """A process of this node can load HAMi-core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeObject:
    collection: str
    """API path, such as `/apis/GROUP/VERSION/PLURAL`."""
    kind: str
    labels: Mapping[str, str | None] = field(default_factory=dict)
    """None removes a label. Other keys are not changed."""
    devices: tuple[Mapping[str, Any], ...] = ()
    """`spec.devices`. The writer of the object adds the time of a condition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advertisement:
    served: Mapping[str, tuple[PluginDeviceId, ...]] = field(default_factory=dict)
    """By resource, for the device plugin."""
    node_status: Mapping[str, int] = field(default_factory=dict)
    annotations: Mapping[str, str | None] = field(default_factory=dict)
    """None removes an annotation."""
    labels: Mapping[str, str | None] = field(default_factory=dict)
    """None removes a label."""
    own_labels: Mapping[str, str] = field(default_factory=dict)
    """Other programs may write them, too: ours are removed once they are not here."""
    annotation_entries: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Ours, in comma-separated annotations that others also write."""
    objects: tuple[NodeObject, ...] = ()


def shared_devices(devices: Iterable[Device]) -> list[Device]:
    """Devices in MIG mode are left out."""
    return [device for device in devices if device.mode is DeviceMode.HAMI_CORE]


def trigger_ids(devices: Sequence[Device]) -> tuple[PluginDeviceId, ...]:
    return numbered_ids(shared_devices(devices), lambda _: TRIGGERS)


def numbered_ids(
    devices: Iterable[Device], count: Callable[[Device], int]
) -> tuple[PluginDeviceId, ...]:
    return tuple(
        PluginDeviceId(id=numbered_id(device.uuid, n), healthy=device.healthy, device=device.uuid)
        for device in devices
        for n in range(count(device))
    )


def numbered_id(device: DeviceUuid, number: int) -> str:
    """Return a device ID in the form by which dcgm-exporter finds the GPU.

    >>> numbered_id(DeviceUuid("GPU-8f1a"), 3)
    'GPU-8f1a::3'
    """
    return f"{device}::{number}"


def base36(number: int) -> str:
    """Format a whole number for short device IDs.

    >>> base36(1295)
    'zz'
    """
    digits = ""
    while True:
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
        if not number:
            return digits
