"""The ResourceSlices of a node: its devices, and what pods leave of them for claims; pure.

The scheduler does not know of pods with leases without a claim, so capacities are what these leave.
https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/resource-slice-v1/

A GPU in MIG mode is one device for each profile, whose capacity are its instances that are
allocated or free: kube-scheduler reads counters, which could exclude profiles, from the slices of
all nodes. Another GPU is one device for each sharing mode that claims demand; compatibility groups
keep kube-scheduler from allocating two of them. https://www.kubernetes.dev/resources/keps/5963/
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from services.node_agent.gpus.inventory import PER_NVLINK
from shared.model.devices.device import LABEL_LENGTH, Device, MigProfile
from shared.model.devices.enforcers import NO_DEMAND, HeldBy, SharingMode
from shared.model.devices.time_slices import Interval
from shared.model.leases.lease import Booking, Lease, bookings
from shared.model.names import DeviceUuid, NodeName, PodUid
from shared.model.requests.claim import (
    CORES,
    DRIVER,
    LEASED,
    MEMORY,
    REFUSED,
    SLOTS,
    ClaimMode,
    TaintEffect,
    claimable,
    device_name,
)
from shared.model.requests.request import LEAST_SHARE_MIB, SharingPolicy
from shared.placing.mig_instances import count_free, layout_shapes

API_VERSION = "resource.k8s.io/v1"
ALL_CORES = 100
UNHEALTHY = "leasehold.dev/unhealthy"
PCIE_ROOT = "resource.kubernetes.io/pcieRoot"
NUMA_NODE = "resource.kubernetes.io/numaNode"
MAX_DEVICES = 64
"""Of a slice in which some have taints or consume counters."""
MAX_COUNTER_SETS = 8
GROUPS = "compatibilityGroups"
NO_DEMAND_GROUP = "shared"
SHARING_MODES = "modes"
STRING_LENGTH = 64
_NO_LABEL = re.compile(r"[^A-Za-z0-9_.-]+")
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


HeldAllocation = tuple[PodUid, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimableNode:
    name: NodeName
    uid: str
    devices: tuple[Device, ...]
    leases: tuple[Lease, ...]
    driver_version: str = ""
    taint_effect: TaintEffect = TaintEffect.NO_SCHEDULE
    least_share_mib: int = LEAST_SHARE_MIB
    """The scheduler rounds less memory up to this."""
    has_groups: bool = False


def build_slices(
    node: ClaimableNode, *, generation: int, deallocated: Collection[HeldAllocation] = ()
) -> list[dict[str, Any]]:
    """The scheduler does not subtract `deallocated` allocations, which have leases and no claim."""
    linked = nvlink_groups(node.devices)
    left = _Left(node.leases, deallocated, node.least_share_mib)
    devices: list[dict[str, Any]] = []
    for device in node.devices:
        for name, part in claimable(device).items():
            if (part.mode and not node.has_groups) or not left.allows(device, part.mode):
                continue
            if part.profile is not None:
                count = left.count_instances(device, part.profile)
                if count:
                    devices.append(_instances(name, part.profile, count, device, node))
            elif (capacity := left.capacity(device)) is not None:
                attributes = _attributes(device, node, linked)
                if interval := left.time_slices.get(device.uuid):
                    attributes["timeSlices"] = {"string": interval}
                devices.append(_device(part.mode, attributes, capacity, device, node))
    counted = [device for device in node.devices if node.has_groups and _modes(device)]
    specs = {
        **_numbered("", "devices", devices, MAX_DEVICES),
        **_numbered("-modes", "sharedCounters", list(map(_counter_set, counted)), MAX_COUNTER_SETS),
    } or {"": {"devices": []}}
    pool = {"name": node.name, "generation": generation, "resourceSliceCount": len(specs)}
    return [_slice(node, suffix, {"pool": pool, **spec}) for suffix, spec in specs.items()]


def groups_trial(node: ClaimableNode) -> dict[str, Any] | None:
    """Return a slice to try compatibility groups with, or None if none are needed."""
    if not any(map(_modes, node.devices)):
        return None
    for built in build_slices(replace(node, has_groups=True), generation=1):
        if any("consumesCounters" in device for device in built["spec"].get("devices") or ()):
            built["metadata"]["name"] += "-trial"
            return built
    return None


def _modes(device: Device) -> tuple[ClaimMode, ...]:
    return tuple(part.mode for part in claimable(device).values() if part.mode)


def _counter_set(device: Device) -> dict[str, Any]:
    modes = len(_modes(device)) + 1
    return {
        "name": device_name(device.uuid),
        "counters": {SHARING_MODES: {"value": str(modes)}},
    }


def _numbered(
    kind: str, field: str, items: Sequence[dict[str, Any]], size: int
) -> dict[str, dict[str, Any]]:
    batches = [items[start : start + size] for start in range(0, len(items), size)]
    return {
        kind + (f"-{number}" if number else ""): {field: batch}
        for number, batch in enumerate(batches)
    }


def _slice(node: ClaimableNode, suffix: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": "ResourceSlice",
        "metadata": {
            "name": f"{node.name}-{DRIVER}{suffix}",
            "ownerReferences": [
                {
                    "apiVersion": "v1",
                    "kind": "Node",
                    "name": node.name,
                    "uid": node.uid,
                    "controller": True,
                }
            ],
        },
        "spec": {"driver": DRIVER, "nodeName": node.name, **spec},
    }


class _Left:
    def __init__(
        self,
        leases: Iterable[Lease],
        deallocated: Collection[HeldAllocation],
        least_share_mib: int,
    ) -> None:
        self.least_share_mib = least_share_mib
        self.cores_given: Counter[DeviceUuid] = Counter()
        self.unknown: dict[DeviceUuid, list[Booking]] = {}
        self.modes: dict[DeviceUuid, SharingMode] = {}
        self.time_slices: dict[DeviceUuid, Interval] = {}
        self.layouts: dict[DeviceUuid, str] = {}
        self.positions: defaultdict[DeviceUuid, int] = defaultdict(int)
        """Bits of positions that are leased."""
        self.allocated: Counter[tuple[DeviceUuid, str]] = Counter()
        for lease in leases:
            is_known = (
                lease.claim is not None and (lease.pod, lease.claim.generation) not in deallocated
            )
            self.modes |= {share.device: share.mode for share in lease.shares}
            self.time_slices |= lease.time_slices
            for place, device in ((s.mig, s.device) for s in lease.shares if s.mig is not None):
                self.layouts[device] = place.layout
                self.positions[device] |= 1 << place.position
                self.allocated[device, place.profile] += is_known
            for booking in bookings(lease.shares):
                self.cores_given[booking.device] += booking.cores_percent
                if not is_known:
                    self.unknown.setdefault(booking.device, []).append(booking)

    def allows(self, device: Device, demanded: ClaimMode) -> bool:
        mode: SharingMode | Literal[""] = self.modes.get(device.uuid, "")
        if mode in {"", "mig"} or not device.holds_parts:
            return True
        if mode == "exclusive":
            return not demanded
        demand = HeldBy(compute=demanded) if demanded else NO_DEMAND
        return device.offer.holding(demand, mode=mode, capped=False) is not None

    def capacity(self, device: Device) -> dict[str, Any] | None:
        unknown = self.unknown.get(device.uuid, [])
        if device.holds_parts:
            return self._shared_capacity(device, unknown)
        whole = {"value": mib_quantity(device.memory_mib)}
        return None if unknown else {MEMORY: whole, CORES: {"value": str(ALL_CORES)}}

    def _shared_capacity(self, device: Device, unknown: Sequence[Booking]) -> dict[str, Any] | None:
        exclusive = any(booking.sharing is SharingPolicy.EXCLUSIVE for booking in unknown)
        if exclusive or self.cores_given[device.uuid] >= ALL_CORES:  # the ledger leases no more
            return None
        memory_mib = device.memory_mib - sum(booking.memory_mib for booking in unknown)
        slots = device.slots - sum(booking.shares for booking in unknown)
        cores_percent = ALL_CORES - sum(booking.cores_percent for booking in unknown)
        least_mib = min(self.least_share_mib, device.memory_mib - 1)
        # A capacity must exceed its policy's minimum by a step.
        if memory_mib <= least_mib or slots < 1:
            return None
        most = {"min": "0", "max": str(cores_percent), "step": "1"}
        return {
            MEMORY: {
                "value": mib_quantity(memory_mib),
                "requestPolicy": {
                    "default": mib_quantity(device.memory_mib),
                    "validRange": {"min": mib_quantity(least_mib), "step": "1Mi"},
                },
            },
            CORES: {
                "value": str(cores_percent),
                "requestPolicy": {
                    "default": "0",
                    **({"validRange": most} if cores_percent > 0 else {}),
                },
            },
            SLOTS: {"value": str(slots), "requestPolicy": {"default": "1", "validValues": ["1"]}},
        }

    def count_instances(self, device: Device, profile: MigProfile) -> int:
        layout = self.layouts.get(device.uuid, "")
        free = count_free(layout_shapes(device.layouts), layout, self.positions[device.uuid])
        return free.get(profile.name, 0) + self.allocated[device.uuid, profile.name]


def _device(
    mode: ClaimMode,
    attributes: dict[str, Any],
    capacity: dict[str, Any],
    device: Device,
    node: ClaimableNode,
) -> dict[str, Any]:
    if mode:
        attributes["type"] = {"string": mode}
    shared = {"allowMultipleAllocations": True} if device.holds_parts else {}
    counted = {
        "counterSet": device_name(device.uuid),
        "counters": {SHARING_MODES: {"value": "1"}},
        GROUPS: [mode or NO_DEMAND_GROUP],
    }
    return {
        "name": device_name(device.uuid, mode),
        "attributes": attributes,
        "capacity": capacity,
        **_guarded(device, node.taint_effect),
        **shared,
        **({"consumesCounters": [counted]} if node.has_groups and _modes(device) else {}),
    }


def _instances(
    name: str, profile: MigProfile, count: int, device: Device, node: ClaimableNode
) -> dict[str, Any]:
    size = mib_quantity(profile.memory_mib)
    return {
        "name": name,
        "attributes": {
            **_attributes(device, node, {}),
            "type": {"string": "mig"},
            "profile": {"string": profile.name},
            "memoryMiB": {"int": profile.memory_mib},
        },
        "capacity": {
            MEMORY: {
                "value": mib_quantity(count * profile.memory_mib),
                "requestPolicy": {"default": size, "validValues": [size]},
            }
        },
        **_guarded(device, node.taint_effect),
        "allowMultipleAllocations": True,
    }


def _guarded(device: Device, effect: TaintEffect) -> dict[str, Any]:
    guarded: dict[str, Any] = {
        "bindsToNode": True,
        "bindingConditions": [LEASED],
        "bindingFailureConditions": [REFUSED],
    }
    if not device.healthy:
        fault = _NO_LABEL.sub("-", device.fault)[:LABEL_LENGTH].strip("-_.")
        guarded["taints"] = [{"key": UNHEALTHY, "value": fault, "effect": effect.value}]
    return guarded


def _attributes(
    device: Device, node: ClaimableNode, groups: Mapping[DeviceUuid, int]
) -> dict[str, Any]:
    version = _VERSION.match(node.driver_version)
    texts = {
        "type": "gpu",
        "uuid": device.uuid,
        "model": device.model[:STRING_LENGTH],
        PCIE_ROOT: device.pcie,
    }
    numbers = {
        "index": device.index,
        "memoryMiB": device.memory_mib,
        "numaNode": device.numa,
        NUMA_NODE: device.numa,
        "nvlinkGroup": groups.get(device.uuid),
    }
    return {
        **{name: {"string": text} for name, text in texts.items() if text},
        **{name: {"int": number} for name, number in numbers.items() if number is not None},
        **({"driverVersion": {"version": _semantic(version)}} if version else {}),
    }


def _semantic(version: re.Match[str]) -> str:
    """`535.104.05` becomes 535.104.5."""
    return ".".join(str(int(number or 0)) for number in version.groups())


def mib_quantity(mib: int) -> str:
    """Return an amount as the API server writes it.

    >>> mib_quantity(81920)
    '80Gi'
    """
    for suffix in ("Mi", "Gi"):
        if mib % 1024:
            return f"{mib}{suffix}"
        mib //= 1024
    return f"{mib}Ti"


def nvlink_groups(devices: Iterable[Device]) -> dict[DeviceUuid, int]:
    by_uuid = {device.uuid: device for device in devices}
    groups: dict[DeviceUuid, int] = {}
    for first in sorted(by_uuid.values(), key=lambda device: device.index):
        waiting = [first] if first.uuid not in groups else []
        while waiting:
            device = waiting.pop()
            linked = [
                by_uuid[uuid]
                for uuid, score in device.links.items()
                if score >= PER_NVLINK and uuid in by_uuid and uuid not in groups
            ]
            if linked or device is not first:
                groups[device.uuid] = first.index
            waiting += linked
    return groups


def find_dropped_fields(wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> frozenset[str]:
    kept = {device.get("name"): device for device in stored.get("devices") or ()}
    dropped = {
        name
        for device in wanted.get("devices") or ()
        for name in device
        if name not in kept.get(device["name"], {})
    }
    counted = (
        counters for device in kept.values() for counters in device.get("consumesCounters") or ()
    )
    if any(GROUPS not in counters for counters in counted):
        dropped.add(GROUPS)
    if "sharedCounters" in wanted and not stored.get("sharedCounters"):
        dropped.add("sharedCounters")
    return frozenset(dropped)


def is_current(wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> bool:
    return _comparable(wanted) == _comparable(stored)


def _comparable(spec: Mapping[str, Any]) -> dict[str, Any]:
    devices = [
        {**device, "taints": [{**taint, "timeAdded": ""} for taint in device.get("taints") or ()]}
        for device in spec.get("devices") or ()
    ]
    pool = {**spec.get("pool", {}), "generation": 0}
    counters = spec.get("sharedCounters") or []
    return {
        "nodeName": spec.get("nodeName"),
        "pool": pool,
        "devices": devices,
        "sharedCounters": counters,
    }
