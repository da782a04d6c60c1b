"""Devices, their use in the ledger, and why a request does not fit on one; pure."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, structs

from shared.model.bounds import (
    BILLION,
    MOST_DEVICES,
    SHORT,
    Amount,
    Count,
    Index,
    LongText,
    Mib,
    ModelText,
    NameText,
    Percent,
    Reading,
    Seconds,
    ShortText,
)
from shared.model.denial import Denial
from shared.model.devices.enforcers import (
    HAMI_CORE_ALONE,
    INSTANCE,
    LABELS,
    MEMORY_BY_DEFAULT,
    NO_DEMAND,
    WHOLE,
    Holding,
    MissingEnforcer,
    Offer,
    SharingMode,
)
from shared.model.devices.replicas import Replicas
from shared.model.names import DeviceUuid, Namespace
from shared.model.quantity import timestamp
from shared.model.requests.request import GpuRequest, SharingPolicy

LABEL_LENGTH = 63
MOST_XIDS = 16
UNNAMED = DeviceUuid("")
NO_RESPONSE_CODE = "NoResponse"
_NO_LABEL = re.compile(r"[^A-Za-z0-9_.-]+")
_NAMESPACE_OF_POD = re.compile(r"(?<![a-z0-9-])([a-z0-9-]+)/[a-z0-9.-]+")
"""Only whole words are tried, so that the time is linear."""


class DeviceMode(StrEnum):
    """How a device is divided: by amounts, by hardware instances, or into equal replicas."""

    HAMI_CORE = "hami-core"
    MIG = "mig"
    REPLICAS = "replicas"


POD_MODES = (DeviceMode.HAMI_CORE, DeviceMode.MIG)
"""What pods and settings may name."""


class Isolation(StrEnum):
    """Which shares a device may have, besides MIG instances."""

    SHARED = "shared"
    STRICT = "strict"


@dataclass(frozen=True, slots=True, kw_only=True)
class MigProfile:
    """The shape of a MIG instance, and how many of it a layout has."""

    name: ShortText
    memory_mib: Mib
    count: Annotated[int, Meta(ge=0, le=16)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MigLayout:
    """All MIG instances of a device; positions count through its profiles in their order."""

    name: ShortText
    """Volcano's group name, as in annotations."""
    profiles: Annotated[tuple[MigProfile, ...], Meta(max_length=16)]

    @property
    def positions(self) -> tuple[MigProfile, ...]:
        return tuple(profile for profile in self.profiles for _ in range(profile.count))


NUMA_CPUS_PREFIX = "cpu of NUMA node "


def numa_cpus_name(numa: int) -> str:
    """Kubernetes has no resource with spaces in its name."""
    return f"{NUMA_CPUS_PREFIX}{numa}"


Links = Annotated[Mapping[DeviceUuid, Count], Meta(max_length=MOST_DEVICES)]
MOST_LEFTOVERS = 16
MOST_PIDS = 8


class Held(msgspec.Struct, frozen=True, gc=False):
    """What a node's agent has given out of a device beyond the leases of the ledger."""

    memory_mib: Mib = 0
    cores_percent: Percent = 0
    shares: Count = 0
    slots: Annotated[str, Meta(max_length=4096)] = ""
    """The digit `1` for each slot, or position of the layout, that is held."""
    layout: ShortText = ""
    mode: SharingMode = "hami-core"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """What is left on a device of a pod or claim that is gone or has no lease."""

    namespace: Namespace
    name: NameText
    memory_mib: Mib
    since: Seconds
    claim: bool = False
    pids: Annotated[tuple[Amount, ...], Meta(max_length=MOST_PIDS)] = ()
    leased: bool = False
    """Its lease ends when the processes have."""

    def text(self, device: str) -> str:
        """Describe it, without a name where that is hidden."""
        what = "ResourceClaim" if self.claim else "pod"
        name = f"{what} {self.namespace}/{self.name}" if self.name else f"a {what}"
        end = "was deleted" if self.leased else "has no lease any more"
        holders = f"processes {', '.join(map(str, self.pids))}" if self.pids else "containers"
        return (
            f"{holders} of {name}, which {end}, still hold {self.memory_mib} MiB of {device} since "
            f"{timestamp(self.since)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A physical GPU as its node reports it, without its use."""

    uuid: DeviceUuid
    index: Index
    """NVML's minor number: the order of `node-vgpu-register`, and gpushare's card index."""
    model: ModelText
    memory_mib: Mib
    """Without what the driver keeps; leased in whole units."""
    slots: Count
    """The most shares at once (Volcano: `deviceSplitCount`)."""
    unit_mib: Annotated[int, Meta(ge=1, le=2**24)] = 1
    """Of a memory request (Volcano: `gpuMemoryFactor`)."""
    mode: DeviceMode = DeviceMode.HAMI_CORE
    healthy: bool = True
    fault: LongText = ""
    numa: Index | None = None
    pcie: ShortText = ""
    """PCIe root complex, such as `pci0000:3a`."""
    bus: ShortText = ""
    """PCI address, such as `0000:3b:00.0`."""
    links: Links = field(default_factory=dict)
    """HAMi's score of the pair: 10 across sockets to 60 on one board, plus 100 per NVLink."""
    layouts: Annotated[tuple[MigLayout, ...], Meta(max_length=64)] = ()
    isolation: Isolation = Isolation.SHARED
    replicas: Replicas | None = None
    offer: Offer = HAMI_CORE_ALONE
    """What can hold parts of it; whole devices and MIG instances need nothing else."""
    missing: Annotated[tuple[MissingEnforcer, ...], Meta(max_length=len(LABELS))] = ()
    power_limit_w: Count = 0
    numa_cpus: Count | None = None
    """CPUs of its NUMA node that the kubelet can give exclusively; None if it does not reject
    containers that would get other CPUs."""
    one_numa: bool = False
    """Policy `single-numa-node`."""
    held: Held | None = None
    leftovers: Annotated[tuple[Leftover, ...], Meta(max_length=MOST_LEFTOVERS)] = ()

    def __post_init__(self) -> None:
        if (self.mode is DeviceMode.REPLICAS) is (self.replicas is None):
            raise ValueError(f"a device in {self.mode} mode has replicas {self.replicas}")

    @property
    def holds_parts(self) -> bool:
        return (
            self.isolation is Isolation.SHARED
            and self.replicas is None
            and (self.offer.holding(NO_DEMAND, mode="", capped=True) is not None)
        )

    @property
    def missing_text(self) -> str:
        return "; ".join(enforcer.reason for enforcer in self.missing)

    @property
    def public_fault(self) -> str:
        """For users of any namespace; empty if the fault names pods."""
        return visible_fault(self.fault, lambda _: False)

    @property
    def health_text(self) -> str:
        """For users of any namespace."""
        return f"it is unhealthy: {self.public_fault}".removesuffix(": ")

    @property
    def leftover_text(self) -> str:
        if not self.leftovers:
            return ""
        mib = sum(leftover.memory_mib for leftover in self.leftovers)
        pods = f"{len(self.leftovers)} earlier pods" if self.leftovers[1:] else "an earlier pod"
        since = timestamp(min(leftover.since for leftover in self.leftovers))
        return f"processes of {pods} still hold {mib} MiB of it since {since}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadDevice:
    """A GPU that the kernel's driver lists, and that the agent cannot read."""

    uuid: DeviceUuid = UNNAMED
    """`UNNAMED` while the driver does not know it: it may be any device of the node."""
    index: Index = -1
    model: ModelText = ""
    bus: ShortText = ""
    reason: LongText

    @property
    def fault(self) -> str:
        return f"{NO_RESPONSE_CODE}: {self.reason}"


END_LEFTOVERS = (
    "end the processes on the node (kill -9 PID); if they stay, reset the GPU (nvidia-smi "
    "--gpu-reset -i INDEX), or restart the node"
)


def model_label(model: str) -> str:
    return _NO_LABEL.sub("-", model.removeprefix("NVIDIA "))[:LABEL_LENGTH].strip("-_.")


def longest_name_in(model: str, names: Iterable[str]) -> str | None:
    """Ignore letter case; return None if the model contains no name."""
    contained = [name for name in names if name.lower() in model.lower()]
    return max(contained, key=len) if contained else None


def visible_fault(fault: str, is_visible: Callable[[Namespace], bool]) -> str:
    """Empty if the fault names a pod of a hidden namespace."""
    named = (Namespace(name) for name in _NAMESPACE_OF_POD.findall(fault))
    return fault if all(map(is_visible, named)) else ""


class DeviceUse(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What live leases use of a device."""

    memory_mib: int = 0
    cores_percent: int = 0
    shares: int = 0
    fence: int = 0
    anti_affinity_groups: frozenset[str] = frozenset()
    exclusive: bool = False
    """Also if the device is claimed."""
    slots_taken: str = ""
    layout: str = ""
    mode: SharingMode | Literal[""] = ""
    claimed_by: bool = False
    """It is reserved for a pod that preempts, or whose start is planned."""
    claimed_until: int = 0
    """Leases that end by this Unix second may use a claimed device; 0 if none may."""
    held: Held | None = None

    @property
    def taken(self) -> "DeviceUse":
        """With what is held beyond the leases."""
        held = self.held
        if held is None:
            return self
        same = (held.layout, held.mode) == (self.layout, self.mode)
        differ = self.shares > 0 and held.shares > 0 and not same
        return structs.replace(
            self,
            memory_mib=self.memory_mib + held.memory_mib,
            cores_percent=self.cores_percent + held.cores_percent,
            shares=self.shares + held.shares,
            exclusive=self.exclusive or differ,
            slots_taken=_either(self.slots_taken, held.slots),
            layout=self.layout or held.layout,
            mode=self.mode or (held.mode if held.shares else ""),
            held=None,
        )


def _either(first: str, second: str) -> str:
    return "".join("1" if "1" in marks else "0" for marks in zip_longest(first, second))


def with_claim(use: DeviceUse, until: float) -> DeviceUse:
    """Claim the device until an instant; 0 leaves it unclaimed."""
    return structs.replace(
        use, exclusive=use.exclusive or until > 0, claimed_by=until > 0, claimed_until=int(until)
    )


def without_claim(use: DeviceUse) -> DeviceUse:
    return structs.replace(use, exclusive=False, claimed_by=False, claimed_until=0)


NO_USE = DeviceUse()
MIB = 1 << 20


def required_memory_mib(request: GpuRequest, device: Device) -> int:
    """Return the MiB of `device` that one share for `request` takes.

    A percentage has precedence over an amount: it counts whole units of the device's memory, at
    least one (or whole MiB, where the dialect requires it), rounded down. Bytes are rounded up.
    """
    request = request_on(request, device)
    unit = 1 if request.percent_of_mib else device.unit_mib
    everything = device.memory_mib // device.unit_mib * device.unit_mib
    if request.whole:
        return everything
    if request.memory_billionths:
        return max(1, device.memory_mib * request.memory_billionths // BILLION)
    if request.memory_percent is not None:
        units = device.memory_mib // unit * request.memory_percent // 100
        return units if request.percent_of_mib else max(1, units) * unit
    if request.memory_bytes is not None:
        return -(-request.memory_bytes // MIB)
    if request.memory_units is not None:
        return request.memory_units * device.unit_mib
    return everything


def required_cores_percent(request: GpuRequest) -> int:
    return 100 if request.whole else request.cores_percent


def request_on(request: GpuRequest, device: Device) -> GpuRequest:
    """Turn a whole device into a replica of a device that has replicas."""
    if device.replicas is None:
        return request
    return device.replicas.request_of(request, device.memory_mib)


def isolation_allows(
    request: GpuRequest, device: Device, mode: SharingMode | Literal[""] = ""
) -> bool:
    strict = request.strict or device.isolation is Isolation.STRICT
    if strict and request.sharing is not SharingPolicy.EXCLUSIVE:
        return False
    return holding_of(request, device, mode) is not None


def holding_of(
    request: GpuRequest, device: Device, mode: SharingMode | Literal[""] = ""
) -> Holding | None:
    """Return what would hold a share for `request` on a device in this mode, or None."""
    demand = request.held_by
    if demand.memory == "mig":
        return INSTANCE if device.mode is DeviceMode.MIG else None
    if device.replicas is not None:
        return device.replicas.holding(device.offer, mode) if demand == NO_DEMAND else None
    if request.whole:
        return WHOLE
    return device.offer.holding(
        demand, mode=mode, capped=request.cores_percent > 0, limited=request.limited
    )


IDLE_BEFORE = (SharingPolicy.EXCLUSIVE, SharingPolicy.IDLE_DEVICE)
"""A tuple, since enum members hash slowly."""


def device_refusal(
    request: GpuRequest,
    device: Device,
    use: DeviceUse,
    *,
    memory_mib: int,
    own: DeviceUse = NO_USE,
    anti_affinity_groups: Iterable[str] = (),
) -> Denial | None:
    """Return why a share for `request` does not fit on `device`, or None if it fits.

    `use` is by other pods, `own` by earlier containers of the same pod. The checks are in Volcano's
    order, so that its users find the reason that they expect.

    This is the definition. It is coded again where it is too slow, or must not be believed: in
    `shared.placing.index`, `capacity.lua`, and the node agent's `device_guard`. `test_fits.py`
    compares them.
    """
    if device.replicas is not None and device.healthy:
        refusal = device.replicas.refusal(request)
        if refusal is not None:
            return refusal
        request = request_on(request, device)
    return _device_reason(request, device, use) or _with_leftovers(
        _slots_reason(request, device, use, own)
        or _group_reason(use, anti_affinity_groups)
        or _amount_reason(request, device, use, own, memory_mib)
        or _idle_reason(request, use, own)
        or _sharing_reason(request, use, own),
        device,
    )


def _with_leftovers(refusal: Denial | None, device: Device) -> Denial | None:
    if refusal is None or not device.leftovers:
        return refusal
    return Denial(refusal.code, f"{refusal.text}; {device.leftover_text}")


def _device_reason(request: GpuRequest, device: Device, use: DeviceUse) -> Denial | None:
    if not device.healthy:
        return Denial("GpuUnhealthy", device.health_text)
    wants_replica = request.replica_only and device.replicas is None
    if device.mode is DeviceMode.MIG or wants_replica:
        text = f"it is in {device.mode} mode, and the pod cannot use an instance"
        return Denial("GpuModeMismatch", "it is not offered as replicas" if wants_replica else text)
    if isolation_allows(request, device, use.mode):
        return None
    part = request.sharing is not SharingPolicy.EXCLUSIVE
    if part and request.strict:
        text = "the pod's isolation is strict: it can use only MIG instances and whole GPUs"
        return Denial("GpuIsolationStrict", text)
    if part and device.isolation is Isolation.STRICT:
        text = "its node's isolation is strict: it serves only MIG instances and whole GPUs"
        return Denial("GpuNotShared", text)
    return _holding_reason(request, device, use.mode)


def _holding_reason(request: GpuRequest, device: Device, mode: SharingMode | Literal[""]) -> Denial:
    demanded = request.held_by != NO_DEMAND
    if holding_of(request, device) is not None:
        text = f"its leases share it in mode {mode}, which changes when the last of them ends"
        return Denial("GpuSharingMode", text)
    if demanded:
        offered = ", ".join(dict.fromkeys((*device.offer.memory, *device.offer.compute)))
        text = f"the pod demands {request.held_by}, and it offers {offered or 'none'}"
        words = (request.held_by.memory, request.held_by.compute)
        reasons = [lacks.reason for lacks in device.missing if lacks.name in words]
        return Denial("GpuEnforcerMissing", f"{text}: {'; '.join(reasons)}" if reasons else text)
    usual = [lacks.reason for lacks in device.missing if lacks.name in MEMORY_BY_DEFAULT]
    return Denial("GpuNotIsolated", "; ".join(reversed(usual)) or "limits would not be enforced")


def _slots_reason(
    request: GpuRequest, device: Device, use: DeviceUse, own: DeviceUse
) -> Denial | None:
    slots = request.slots or device.slots
    if not request.slotted or use.shares + own.shares < slots:
        return None
    of_them = f", {own.shares} of them by earlier containers" if own.shares else ""
    if device.replicas is not None:
        return Denial("GpuReplicasTaken", f"all {slots} of its replicas are taken{of_them}")
    return Denial("GpuSlotsTaken", f"all {slots} of its shares are taken{of_them}")


def _group_reason(use: DeviceUse, groups: Iterable[str]) -> Denial | None:
    if use.anti_affinity_groups.isdisjoint(groups):
        return None
    shared_groups = ", ".join(sorted(use.anti_affinity_groups.intersection(groups)))
    return Denial("GpuGroupSpread", f"it already has a pod of group {shared_groups}")


def _amount_reason(
    request: GpuRequest, device: Device, use: DeviceUse, own: DeviceUse, memory_mib: int
) -> Denial | None:
    if use.memory_mib + own.memory_mib + memory_mib > device.memory_mib:
        beside = f" beside {own.memory_mib} for earlier containers" if own.memory_mib else ""
        free_mib = max(0, device.memory_mib - use.memory_mib)
        free = f"{free_mib} of {device.memory_mib} MiB are free"
        text = f"{memory_mib} MiB are requested{beside}, {free}"
        return Denial("InsufficientGpuMemory", text)
    cores = required_cores_percent(request)
    if use.cores_percent + own.cores_percent + cores > 100:
        beside = f" beside {own.cores_percent} % for earlier ones" if own.cores_percent else ""
        free = f"{max(0, 100 - use.cores_percent)} % are free"
        text = f"{cores} % of its cores are requested{beside}, {free}"
        return Denial("InsufficientGpuCores", text)
    return None


def _idle_reason(request: GpuRequest, use: DeviceUse, own: DeviceUse) -> Denial | None:
    if request.sharing not in IDLE_BEFORE or use.shares + own.shares == 0:
        return None
    text = f"the pod requires an idle device, and {use.shares} shares are on it"
    if not use.shares:
        text = "the container requires an idle device, and an earlier one of the pod uses it"
    return Denial("GpuNotIdle", text)


def _sharing_reason(request: GpuRequest, use: DeviceUse, own: DeviceUse) -> Denial | None:
    if use.layout:
        return Denial("GpuInstancesLive", "its MIG instances are in use")
    cores = use.cores_percent + own.cores_percent
    no_cores = cores >= 100 and request.sharing is not SharingPolicy.BEST_EFFORT
    if not (use.exclusive or own.exclusive or no_cores):
        return None
    if use.claimed_by:
        text = "it is reserved for a pod that preempts others or whose start is planned"
        if use.claimed_until:
            text += "; a pod whose maximum run time ends before that may use it"
        return Denial("GpuClaimed", text)
    if use.exclusive:
        return Denial("GpuInExclusiveUse", "another pod uses it exclusively")
    if own.exclusive:
        text = "an earlier container of the pod uses it exclusively"
        return Denial("GpuInExclusiveUse", text)
    return Denial("GpuCoresReserved", "all of its cores are reserved")


TEMPERATURE = "temperature"


class XidEvent(msgspec.Struct, frozen=True, kw_only=True):
    number: Count
    at: Seconds
    meaning: Annotated[str, Meta(max_length=4 * SHORT)] = ""


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver reports of a device; null where it does not."""

    device: DeviceUuid
    at: Seconds
    temperature_c: Reading | None = None
    power_w: Reading | None = None
    power_limit_w: Reading | None = None
    sm_clock_mhz: Reading | None = None
    memory_clock_mhz: Reading | None = None
    busy_percent: Reading | None = None
    throttle: Annotated[tuple[ShortText, ...], Meta(max_length=16)] = ()
    xids: Annotated[tuple[XidEvent, ...], Meta(max_length=MOST_XIDS)] = ()

    @property
    def is_hot(self) -> bool:
        return any(reason.startswith(TEMPERATURE) for reason in self.throttle)

    @property
    def heat_text(self) -> str:
        degrees = "" if self.temperature_c is None else f" ({self.temperature_c:.0f} °C)"
        return f"is slowed down by its temperature{degrees}"
