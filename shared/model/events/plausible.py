"""Relations between the fields of a node's message, whatever the ledger holds; pure."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shared.model.devices.device import Device
from shared.model.events.event import Event
from shared.model.events.node_events import (
    Allocation,
    DeviceReported,
    DevicesRegistered,
    HealthChanged,
    ShareActivated,
    ShareRefused,
    ViolationFound,
    ViolationReason,
)
from shared.model.names import NodeName

SHOWN = 100


def implausible(event: Event) -> str:
    """Return why this event of a node is refused as a whole, or ""."""
    check = CHECKS.get(type(event))
    return next(iter(check(event)), "") if check else ""


def _report(event: DeviceReported) -> Iterable[str]:
    unread = (gpu.uuid for gpu in event.unread if gpu.uuid)
    yield from _twice("device", (*(device.uuid for device in event.devices), *unread))
    yield from _twice("index", (str(device.index) for device in event.devices if device.healthy))
    for device in event.devices:
        yield from _device(device)
    for allocation in event.allocations:
        yield from _allocation(allocation, event.node)


def _device(device: Device) -> Iterable[str]:
    if not device.uuid:
        yield f"device {device.index} has no UUID"
    if not device.unit_mib <= device.memory_mib:
        yield (
            f"device {_shown(device.uuid)} has {device.memory_mib} MiB in units of "
            f"{device.unit_mib} MiB"
        )


def _twice(what: str, names: Iterable[str]) -> Iterable[str]:
    for name, count in Counter(names).items():
        if count > 1:
            yield f"{what} {_shown(name)} is listed {count} times"


def _allocation(allocation: Allocation, node: NodeName) -> Iterable[str]:
    lease = allocation.lease
    if lease.node != node:
        yield f"it has an allocation of pod {_shown(allocation.pod)} on node {_shown(lease.node)}"
    holder = (allocation.pod, allocation.namespace, allocation.name)
    if holder != (lease.pod, lease.namespace, lease.name) or not all(holder):
        yield f"the allocation of pod {_shown(allocation.pod)} has a lease of {_shown(lease.pod)}"
    for share in lease.shares:
        if not share.device or share.memory_mib > share.device_mib:
            yield (
                f"the share of pod {_shown(lease.pod)} is {share.memory_mib} of "
                f"{share.device_mib} MiB of device {_shown(share.device)}"
            )


def _violation(event: ViolationFound) -> Iterable[str]:
    if event.reason not in set(ViolationReason):
        yield f"{_shown(event.reason)} is no reason of a violation"
    if not (event.pod and event.namespace and event.name):
        yield "a pod that breaks a rule has no uid, namespace or name"


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}…")


CHECKS: Mapping[type[Event], Callable[[Any], Iterable[str]]] = {
    DeviceReported: _report,
    DevicesRegistered: _report,
    ShareActivated: lambda event: _allocation(event.allocation, event.node),
    ShareRefused: lambda event: ["a refused pod has no uid"] * (event.pod == ""),
    ViolationFound: _violation,
    HealthChanged: lambda event: [f"device {event.index} has no UUID"] * (not event.device),
}
