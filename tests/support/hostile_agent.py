"""What somebody with the NATS credential of one node's agent says of others, and may not; pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from shared.model.bounds import LATEST_S, MOST, MOST_MIB
from shared.model.devices.device import MOST_LEFTOVERS, MOST_PIDS, Device, Held, Leftover
from shared.model.events.event import Event
from shared.model.events.node_events import (
    Allocation,
    DeviceReported,
    HealthChanged,
    LeaseHolder,
    ShareActivated,
    ShareRefused,
    ViolationFound,
    ViolationReason,
)
from shared.model.leases.lease import Lease
from shared.model.names import DeviceUuid, Namespace, NodeName
from tests.support.build import allocation_of

HIGHEST = 2**52 - 1
"""Above all fences and versions that are believed."""
LIE = "it lies"
"""The text of each lie that has one."""
SIZES = ("same", "1 MiB", "whole")


def altered(lease: Lease, size: str, node: NodeName) -> Lease:
    """Return the lease on a node; with another size also with versions too high to count on."""
    if size == "same":
        return structs.replace(lease, node=node)
    shares = tuple(
        structs.replace(
            share,
            memory_mib=1 if size == "1 MiB" else share.device_mib,
            slot=7 if share.slot is not None else None,
            fence=HIGHEST,
        )
        for share in lease.shares
    )
    return structs.replace(lease, node=node, shares=shares, version=HIGHEST)


def forged_allocation(lease: Lease) -> Allocation:
    """Return the allocation of the first container of a lease."""
    return allocation_of(lease, container=lease.shares[0].container)


def with_stolen(own: Sequence[Device], others: Sequence[Device]) -> tuple[Device, ...]:
    """Return the node's own devices and others', at indexes that are free."""
    stolen = enumerate(others, start=len(own) + 10)
    return (*own, *(replace(device, index=index) for index, device in stolen))


MOST_HELD = Held(
    memory_mib=MOST_MIB, cores_percent=100, shares=65_535, slots="1" * 4096, layout="\0" * 63
)
"""The most that an agent may say to have given out of a device beyond the leases."""
EXTREMES_OF_HELD = (
    Held(),
    *(
        Held(**{name: getattr(MOST_HELD, name)})
        for name in ("memory_mib", "cores_percent", "shares", "slots", "layout")
    ),
    MOST_HELD,
)
MOST_LEFT = MOST_LEFTOVERS * (
    Leftover(
        namespace=Namespace("\x1b" * 63),
        name="\x1b" * 253,
        memory_mib=MOST_MIB,
        since=LATEST_S,
        pids=(MOST,) * MOST_PIDS,
        claim=True,
        leased=True,
    ),
)
"""The most that an agent may say to be left on a device of pods that have ended."""
BEYOND_BOUNDS: Mapping[str, Sequence[Any]] = {
    "memory_mib": (-1, MOST_MIB + 1, 1.5, "1", float("nan")),
    "cores_percent": (-1, 101),
    "shares": (-1, 65_536),
    "slots": ("1" * 4097, 1),
    "layout": ("x" * 64, 1),
}
"""By field of what is held, values that no agent may send."""
LEFT_BEYOND_BOUNDS: Mapping[str, Sequence[Any]] = {
    "namespace": ("x" * 64, 1),
    "name": ("x" * 254,),
    "memory_mib": (-1, MOST_MIB + 1),
    "since": (-1.0, LATEST_S * 1.01, float("nan"), float("inf")),
    "pids": ([-1], [MOST + 1], [1] * (MOST_PIDS + 1), "1"),
    "claim": (2,),
}
"""The same for what is left of a pod."""


def highest_fences(devices: Sequence[Device]) -> Mapping[DeviceUuid, int]:
    """Return the highest fence for each device."""
    return {device.uuid: HIGHEST for device in devices}


def lies_about(lease: Lease, node: NodeName) -> Iterator[Event]:
    """Yield what the agent of `node` may not say of a lease that another node has."""
    for forged in (lease, *(altered(lease, size, node) for size in SIZES)):
        yield ShareActivated(node=node, allocation=forged_allocation(forged))
    yield refusal(lease, node)
    for reason in ViolationReason:
        yield violation(lease, node, reason)
    holders = (LeaseHolder(**_holder(lease)),)
    for share in lease.shares:
        yield HealthChanged(
            node=node, device=share.device, index=share.index, healthy=False, holders=holders
        )


def false_reports(
    leases: Sequence[Lease], own: Sequence[Device], others: Sequence[Device], node: NodeName
) -> Iterator[DeviceReported]:
    """Yield reports of `node` with devices, fences and allocations that others have."""
    report = DeviceReported(node=node, devices=tuple(own), served=(), reported_at=1.0)
    stolen = with_stolen(own, others)
    yield replace(report, devices=stolen)
    yield replace(report, fences=highest_fences(stolen))
    for size in SIZES:
        forged = tuple(forged_allocation(altered(lease, size, node)) for lease in leases)
        yield replace(report, allocations=forged)
        yield replace(report, devices=stolen, fences=highest_fences(stolen), allocations=forged)


def refusal(lease: Lease, node: NodeName) -> ShareRefused:
    """Return that an agent refused a pod's share."""
    return ShareRefused(**_holder(lease), node=node, reason=LIE)


def violation(
    lease: Lease, node: NodeName, reason: ViolationReason = ViolationReason.OVERRUN
) -> ViolationFound:
    """Return that a pod does more than its lease allows."""
    container = lease.shares[0].container
    return ViolationFound(
        **_holder(lease), node=node, container=container, reason=reason, message=LIE
    )


def _holder(lease: Lease) -> dict[str, Any]:
    return {"pod": lease.pod, "namespace": lease.namespace, "name": lease.name}
