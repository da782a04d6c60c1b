"""The advertisement of a node: device-plugin lists, node status, annotations, labels; pure."""

import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.model.devices.device import Device, DeviceMode
from shared.model.names import DeviceUuid

TRIGGER = "leasehold.dev/share"
"""Our resource, served where a dialect has none that can be: the kubelet then calls Allocate."""
TRIGGERS = 100
"""IDs per device of a resource whose only purpose is the Allocate call: the most shares."""
NumaNodes = tuple[int, ...]
"""NUMA nodes that device IDs show to the kubelet."""
_DIGITS = string.digits + string.ascii_lowercase


class Strategy:
    """How gpushare's resources are advertised: Volcano's `--gpu-strategy`, and `auto`."""

    AUTO = "auto"
    SHARE = "share"
    NUMBER = "number"
    ALL = (AUTO, SHARE, NUMBER)


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginDeviceId:
    """One device ID of a device-plugin list: at most 63 characters, never reused."""

    id: str
    healthy: bool
    device: DeviceUuid | None = None
    """The device that it identifies; None: any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSoftware:
    """The properties of a node's software that its advertisement depends on."""

    driver_version: str = ""
    """Version of the GPUs' driver; empty: unknown."""
    isolation_available: bool = False
    """HAMi-core's library is installed, and a process of this node can load it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeObject:
    """A cluster-scoped custom object with a node's devices; it has the node's name."""

    collection: str
    """API path of all objects of its kind, such as `/apis/GROUP/VERSION/PLURAL`."""
    kind: str
    labels: Mapping[str, str | None] = field(default_factory=dict)
    """None: the key is removed. Other keys are not changed."""
    devices: tuple[Mapping[str, Any], ...] = ()
    """`spec.devices`. The writer of the object adds the time of a condition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advertisement:
    """The advertisement of a node for one dialect."""

    served: Mapping[str, tuple[PluginDeviceId, ...]] = field(default_factory=dict)
    """Resources of the device plugin, each with its complete list."""
    node_status: Mapping[str, int] = field(default_factory=dict)
    """Resources written into node status."""
    annotations: Mapping[str, str | None] = field(default_factory=dict)
    """Of the node; None: the key is removed."""
    labels: Mapping[str, str | None] = field(default_factory=dict)
    """Of the node; None: the key is removed."""
    annotation_entries: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Our entries in comma-separated lists of node annotations that others write, too."""
    objects: tuple[NodeObject, ...] = ()


def shared_devices(devices: Iterable[Device]) -> list[Device]:
    """Return the devices without those in MIG mode, which most dialects do not know."""
    return [device for device in devices if device.mode is DeviceMode.HAMI_CORE]


def trigger_ids(devices: Sequence[Device]) -> tuple[PluginDeviceId, ...]:
    """Return the list of a resource whose only purpose is the Allocate call, such as `TRIGGER`."""
    return numbered_ids(shared_devices(devices), lambda _: TRIGGERS)


def numbered_ids(
    devices: Iterable[Device], count: Callable[[Device], int]
) -> tuple[PluginDeviceId, ...]:
    """Return the IDs of devices, those of each with numbers from 0."""
    return tuple(
        PluginDeviceId(id=numbered_id(device.uuid, n), healthy=device.healthy, device=device.uuid)
        for device in devices
        for n in range(count(device))
    )


def numbered_id(device: DeviceUuid, number: int) -> str:
    """Return a device ID in the form of NVIDIA's plugin, by which dcgm-exporter finds the GPU."""
    return f"{device}::{number}"


def base36(number: int) -> str:
    """Format a number of 0 or more in base 36, for short device IDs."""
    digits = ""
    while True:
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
        if not number:
            return digits
