"""The ResourceSlices of a node: its devices, and what pods leave of them for claims; pure.

The scheduler subtracts what claims have been allocated, but does not know of pods with leases
without a claim, so capacities are what these leave. A device on which no claim could be leased is
left out. https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/resource-slice-v1/

A GPU in MIG mode is one device for each profile, whose capacity are its instances that are
allocated or free. That its profiles exclude each other is not part of it, but follows with the next
slice once an instance is leased: counters, which could express it, are read by kube-scheduler for
every node from the slices of all nodes.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.node_agent.gpus.inventory import PER_NVLINK
from shared.model.devices.device import LABEL_LENGTH, Device, DeviceMode, MigProfile
from shared.model.leases.lease import Booking, Lease, bookings
from shared.model.names import DeviceUuid, NodeName, PodUid
from shared.model.requests.claim import (
    CORES,
    DRIVER,
    LEASED,
    MEMORY,
    REFUSED,
    SLOTS,
    TaintEffect,
    claimable,
    device_name,
)
from shared.model.requests.request import LEAST_SHARE_MIB, SharingPolicy
from shared.placing.mig_instances import count_free, layout_shapes

API_VERSION = "resource.k8s.io/v1"
ALL_CORES = 100
UNHEALTHY = "leasehold.dev/unhealthy"
"""Its value is the fault."""
PCIE_ROOT = "resource.kubernetes.io/pcieRoot"
NUMA_NODE = "resource.kubernetes.io/numaNode"
"""Kubernetes' own attributes, by which claims match devices of several drivers."""
MAX_DEVICES = 64
"""Of a slice in which some have taints."""
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


def build_slices(
    node: ClaimableNode, *, generation: int, deallocated: Collection[HeldAllocation] = ()
) -> list[dict[str, Any]]:
    """Return the ResourceSlices of the node's pool.

    `deallocated` allocations have leases and no claim: the scheduler does not subtract them.
    """
    groups = nvlink_groups(node.devices)
    left = _Left(node.leases, deallocated, node.least_share_mib)
    devices: list[dict[str, Any]] = []
    for device in node.devices:
        capacity = left.capacity(device)
        if capacity is not None:
            devices.append(_device(device, capacity, node, groups))
        for name, (profile, count) in left.instances(device).items():
            devices.append(_instances(name, profile, count, device, node))
    batches = _batches(devices, MAX_DEVICES) or [[]]
    return [
        _slice(node, number, batch, generation=generation, count=len(batches))
        for number, batch in enumerate(batches)
    ]


def _batches(items: Sequence[dict[str, Any]], size: int) -> list[Sequence[dict[str, Any]]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _slice(
    node: ClaimableNode,
    number: int,
    devices: Sequence[dict[str, Any]],
    *,
    generation: int,
    count: int,
) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": "ResourceSlice",
        "metadata": {
            "name": f"{node.name}-{DRIVER}" + (f"-{number}" if number else ""),
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
        "spec": {
            "driver": DRIVER,
            "nodeName": node.name,
            "pool": {"name": node.name, "generation": generation, "resourceSliceCount": count},
            "devices": devices,
        },
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
        self.layouts: dict[DeviceUuid, str] = {}
        self.positions: defaultdict[DeviceUuid, int] = defaultdict(int)
        """Bits of the layout's positions that are leased."""
        self.allocated: Counter[tuple[DeviceUuid, str]] = Counter()
        """Instances of a profile that the scheduler knows as allocated."""
        for lease in leases:
            is_known = (
                lease.claim is not None and (lease.pod, lease.claim.generation) not in deallocated
            )
            for place, device in ((s.mig, s.device) for s in lease.shares if s.mig is not None):
                self.layouts[device] = place.layout
                self.positions[device] |= 1 << place.position
                self.allocated[device, place.profile] += is_known
            for booking in bookings(lease.shares):
                self.cores_given[booking.device] += booking.cores_percent
                if not is_known:
                    self.unknown.setdefault(booking.device, []).append(booking)

    def capacity(self, device: Device) -> dict[str, Any] | None:
        unknown = self.unknown.get(device.uuid, [])
        if device.mode is DeviceMode.MIG or device.replicas is not None:
            return None
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

    def instances(self, device: Device) -> dict[str, tuple[MigProfile, int]]:
        """Return profiles by name, and how many instances are allocated to claims or free."""
        layout = self.layouts.get(device.uuid, "")
        free = count_free(layout_shapes(device.layouts), layout, self.positions[device.uuid])
        counted = {
            name: (profile, free.get(profile.name, 0) + self.allocated[device.uuid, profile.name])
            for name, profile in claimable(device).items()
            if profile is not None
        }
        return {name: (profile, count) for name, (profile, count) in counted.items() if count}


def _device(
    device: Device,
    capacity: dict[str, Any],
    node: ClaimableNode,
    groups: Mapping[DeviceUuid, int],
) -> dict[str, Any]:
    shared = {"allowMultipleAllocations": True} if device.holds_parts else {}
    return {
        "name": device_name(device.uuid),
        "attributes": _attributes(device, node, groups),
        "capacity": capacity,
        **_guarded(device, node.taint_effect),
        **shared,
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
    """Drop leading zeros, for three numbers: `535.104.05` is 535.104.5."""
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
    return frozenset(dropped)


def is_current(wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> bool:
    return _comparable(wanted) == _comparable(stored)


def _comparable(spec: Mapping[str, Any]) -> dict[str, Any]:
    devices = [
        {**device, "taints": [{**taint, "timeAdded": ""} for taint in device.get("taints") or ()]}
        for device in spec.get("devices") or ()
    ]
    pool = {**spec.get("pool", {}), "generation": 0}
    return {"nodeName": spec.get("nodeName"), "pool": pool, "devices": devices}
