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
    """All of its memory; whole units of it can be leased."""
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
    everything = device.memory_mib // device.unit_mib * device.unit_mib
    if request.whole:
        return everything
    if request.memory_percent is not None:
        units = device.memory_mib // device.unit_mib * request.memory_percent // 100
        return units * device.unit_mib
    if request.memory_units is not None:
        return request.memory_units * device.unit_mib
    return everything


def needed_cores(request: GpuRequest) -> int:
    """Return the percent of a device's cores that one share for `request` books."""
    return 100 if request.whole else request.cores_percent


@dataclass(frozen=True, slots=True)
class DeviceRefusal:
    """Why one device cannot take a share: for machines, and for people."""

    code: str
    text: str


def fits(
    request: GpuRequest, device: Device, use: DeviceUse, *, memory_mib: int, tag: str = ""
) -> bool:
    """Say whether `device` can take a share for `request`: `refusal_of` without the words."""
    cores = needed_cores(request)
    return (
        device.healthy
        and use.memory_mib + memory_mib <= device.memory_mib
        and use.cores_percent + cores <= 100
        and use.cores_percent < 100
        and (cores != 100 or use.shares == 0)
        and (not request.slotted or use.shares < device.slots)
        and not (tag and tag in use.tags)
    )


def refusal_of(
    request: GpuRequest, device: Device, use: DeviceUse, *, memory_mib: int, tag: str = ""
) -> str | None:
    """Say in words why `device` cannot take a share for `request`, or None if it can."""
    refusal = device_refusal(request, device, use, memory_mib=memory_mib, tag=tag)
    return None if refusal is None else refusal.text


def device_refusal(
    request: GpuRequest, device: Device, use: DeviceUse, *, memory_mib: int, tag: str = ""
) -> DeviceRefusal | None:
    """Say why `device` cannot take a share for `request`, or None if it can.

    The order of the checks is the one Volcano's users know, so that the first reason named is the
    one they expect. `use` includes what earlier containers of the same pod were given.
    """
    if fits(request, device, use, memory_mib=memory_mib, tag=tag):
        return None
    cores = needed_cores(request)
    reasons = (
        (not device.healthy, "GpuUnhealthy", "it is unhealthy"),
        (
            request.slotted and use.shares >= device.slots,
            "GpuSlotsTaken",
            f"all {device.slots} share slots are taken",
        ),
        (
            bool(tag) and tag in use.tags,
            "GpuGroupSpread",
            f"it already carries a pod of group {tag}",
        ),
        (
            use.memory_mib + memory_mib > device.memory_mib,
            "InsufficientGpuMemory",
            f"{memory_mib} MiB are wanted, {device.memory_mib - use.memory_mib} of "
            f"{device.memory_mib} MiB are free",
        ),
        (
            use.cores_percent + cores > 100,
            "InsufficientGpuCores",
            f"{cores} % of its cores are wanted, {100 - use.cores_percent} % are free",
        ),
        (
            cores == 100 and use.shares > 0,
            "GpuNotIdle",
            f"the pod wants it alone and {use.shares} shares are on it",
        ),
        (use.cores_percent >= 100, "GpuHeldAlone", "another pod holds all of its cores"),
    )
    return next(DeviceRefusal(code, text) for refused, code, text in reasons if refused)
