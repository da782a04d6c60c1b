"""Devices: what a node agent reports, and what the ledger says is taken of each."""

from dataclasses import dataclass, field
from enum import StrEnum

from shared.model.names import DeviceUuid
from shared.model.request import GpuRequest


class DeviceMode(StrEnum):
    """How a device is divided: by HAMi-core inside the container, or by hardware instances."""

    HAMI_CORE = "hami-core"
    MIG = "mig"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One physical GPU as its node reports it; nothing here says what is in use."""

    uuid: DeviceUuid
    index: int
    """NVML's minor number: the order of `node-vgpu-register`, and gpushare's card index."""
    model: str
    """NVML's product name, such as `Tesla T4` or `NVIDIA A100-SXM4-40GB`."""
    memory_mib: int
    """Memory that can be leased, a multiple of `unit_mib`."""
    slots: int
    """How many shares may be on the device at once (Volcano: `deviceSplitCount`)."""
    unit_mib: int = 1
    """MiB per unit in which pods on this node ask for memory (Volcano: `gpuMemoryFactor`)."""
    mode: DeviceMode = DeviceMode.HAMI_CORE
    healthy: bool = True
    numa: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """What live leases hold of one device."""

    memory_mib: int = 0
    cores_percent: int = 0
    shares: int = 0
    fence: int = 0
    tags: frozenset[str] = field(default_factory=frozenset)
    """Pod groups that must not meet on one device; see `Lease.tag`."""


def needed_mib(request: GpuRequest, device: Device) -> int:
    """Return the memory, in MiB, that one share for `request` takes of `device`.

    A percentage counts whole units of the device's registered memory, rounded down, and wins over
    an amount; neither means all of it.
    """
    if request.whole:
        return device.memory_mib
    if request.memory_percent is not None:
        units = device.memory_mib // device.unit_mib * request.memory_percent // 100
        return units * device.unit_mib
    if request.memory_units is not None:
        return request.memory_units * device.unit_mib
    return device.memory_mib


def refusal_of(
    request: GpuRequest, device: Device, use: DeviceUse, *, memory_mib: int, tag: str = ""
) -> str | None:
    """Say why `device` cannot take a share for `request`, or None if it can.

    The order of the checks is that of the Volcano dossier, so that the first reason named is the
    one its users know. `use` includes what earlier containers of the same pod were given.
    """
    reasons = (
        (not device.healthy, "it is unhealthy"),
        (
            request.slotted and use.shares >= device.slots,
            f"all {device.slots} share slots are taken",
        ),
        (bool(tag) and tag in use.tags, f"it already carries a pod of group {tag}"),
        (
            use.memory_mib + memory_mib > device.memory_mib,
            f"{memory_mib} MiB are wanted, {device.memory_mib - use.memory_mib} of "
            f"{device.memory_mib} MiB are free",
        ),
        (
            use.cores_percent + request.cores_percent > 100,
            f"{request.cores_percent} % of its cores are wanted, "
            f"{100 - use.cores_percent} % are free",
        ),
        (
            request.cores_percent == 100 and use.shares > 0,
            f"the pod wants it alone and {use.shares} shares are on it",
        ),
        (use.cores_percent >= 100, "another pod holds it alone"),
    )
    return next((reason for refused, reason in reasons if refused), None)
