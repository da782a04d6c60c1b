"""The memory of the cluster's largest device, and requests that exceed it; pure.

While the largest device is unknown, because no placer has reported it recently, no request exceeds
it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shared.dialects import GPU_RESOURCES
from shared.model.device import MIB
from shared.model.events.pod_events import LargestDeviceReported
from shared.model.request import GpuRequest
from shared.pods.pod_view import PodContainer

STALE_S = 30.0
"""How long a report counts: a node that is briefly absent does not lower the maximum."""


@dataclass(frozen=True, slots=True)
class DeviceMaximum:
    """The largest memory of any device; the two amounts may be of different devices."""

    memory_mib: int
    memory_units: int


class LargestDevice:
    """The largest device by the placers' recent reports."""

    def __init__(self) -> None:
        self._reported_at: dict[tuple[int, int], float] = {}
        """When each pair of MiB and units was last reported."""

    def note(self, report: LargestDeviceReported, received_at: float) -> None:
        """Record a report and when it was received (on this process' monotonic clock, seconds)."""
        self._reported_at[report.memory_mib, report.memory_units] = received_at

    def now(self, now: float) -> DeviceMaximum | None:
        """Return the maximum of the reports that count at `now` (on the same clock), if any."""
        recent = {key: at for key, at in self._reported_at.items() if now - at <= STALE_S}
        self._reported_at = recent
        if not recent:
            return None
        return DeviceMaximum(
            memory_mib=max(mib for mib, _ in recent),
            memory_units=max(units for _, units in recent),
        )


def excess_memory(
    requests: Iterable[GpuRequest],
    containers: Iterable[PodContainer],
    largest: DeviceMaximum,
) -> str:
    """Return which container requests more of one device than the largest has; empty: none."""
    amounts = {each.name: {**each.requests, **each.limits} for each in containers}
    for request in requests:
        excess = _excess(request, largest)
        if excess:
            written = _written(amounts.get(request.container, {}))
            return (
                f'container "{request.container}": {written} is {excess}; request less memory, or '
                "a whole device"
            )
    return ""


def _excess(request: GpuRequest, largest: DeviceMaximum) -> str:
    if request.whole or request.memory_percent is not None:
        return ""
    if request.memory_bytes is not None:
        mib = -(-request.memory_bytes // MIB)
        if mib > largest.memory_mib:
            return (
                f"{mib} MiB of one device, and the cluster's largest has {largest.memory_mib} MiB"
            )
    elif request.memory_units is not None and request.memory_units > largest.memory_units:
        return (
            f"{request.memory_units} units of one device, and the cluster's largest has "
            f"{largest.memory_units} ({largest.memory_mib} MiB)"
        )
    return ""


def _written(amounts: Mapping[str, int]) -> str:
    return ", ".join(f"{key}={amounts[key]}" for key in sorted(amounts) if key in GPU_RESOURCES)
