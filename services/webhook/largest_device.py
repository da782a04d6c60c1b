"""Requests for more memory than any device has: how much the largest has, and who asks for more.

Pure. Where it is not known, since nobody has told of it for long, nothing is too much.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from services.webhook.pods import ContainerSeen
from shared.dialects import GPU_RESOURCES
from shared.model.device import MIB
from shared.model.events.pod_events import LargestDeviceReported
from shared.model.request import GpuRequest

STALE_S = 120.0
"""What was told counts for so long: a node that is away for a moment takes no device with it."""


@dataclass(frozen=True, slots=True)
class Largest:
    """The most that one device has; the two need not be of the same device."""

    memory_mib: int
    memory_units: int


class LargestHeard:
    """What placers told of the largest device, for as long as it counts."""

    def __init__(self) -> None:
        self._heard: dict[tuple[int, int], float] = {}
        """When each pair of MiB and units was heard last."""

    def note(self, told: LargestDeviceReported, heard_at: float) -> None:
        """Remember what was told, and when it was heard (in the reader's own ticks, seconds)."""
        self._heard[told.memory_mib, told.memory_units] = heard_at

    def now(self, now: float) -> Largest | None:
        """Return the most that counts at `now` (the same ticks), or None if nothing does."""
        self._heard = {key: at for key, at in self._heard.items() if now - at <= STALE_S}
        if not self._heard:
            return None
        return Largest(
            memory_mib=max(mib for mib, _ in self._heard),
            memory_units=max(units for _, units in self._heard),
        )


def too_large(
    requests: Iterable[GpuRequest], containers: Iterable[ContainerSeen], largest: Largest
) -> str:
    """Say which container asks for more of one device than the largest has; empty: none does."""
    amounts = {one.name: {**one.requests, **one.limits} for one in containers}
    for request in requests:
        over = _over(request, largest)
        if over:
            said = _said(amounts.get(request.container, {}))
            return (
                f'container "{request.container}": {said} is {over}; ask '
                "for less memory, or for a whole device"
            )
    return ""


def _over(request: GpuRequest, largest: Largest) -> str:
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


def _said(amounts: Mapping[str, int]) -> str:
    return ", ".join(f"{key}={amounts[key]}" for key in sorted(amounts) if key in GPU_RESOURCES)
