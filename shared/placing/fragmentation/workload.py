"""The mix of pods, learned from those that arrived, the later ones counting more; pure."""

from typing import NamedTuple

from shared.model.device import MIB, Device
from shared.model.request import ALL_PERCENT, DeviceSelection, PodRequest, SharingPolicy

HALF_LIFE = 8192
"""After so many pods, a pod counts half."""
GROWTH = 2 ** (1 / HALF_LIFE)
RESCALE_ABOVE = 1e9
MOST_KINDS = 1024
"""More kinds are not kept: the rarest are dropped."""
TYPICAL_PART = 0.95
TYPICAL_KINDS = 64
"""The typical kinds are the most frequent ones, up to so many and to that part of all pods."""
FIRST_REFRESH, REFRESH_EVERY = 16, 512
"""The typical kinds are chosen again when the number of pods has doubled, and after so many."""


class PodKind(NamedTuple):
    """What pods of one kind request; of several containers the one with the most GPUs counts."""

    cpu: int
    """Thousandths."""
    memory: int
    """Bytes."""
    gpus: int
    memory_percent: int
    """Of each device; 0: see `memory_mib`."""
    memory_mib: int
    memory_units: int
    """In units of the node; with all three 0, it is all of the memory."""
    cores_percent: int
    selection: DeviceSelection

    def part_of(self, device: Device) -> int:
        """Return which part of a device each share takes, in thousandths; 1000 or more: all."""
        cores = 10 * self.cores_percent
        if self.memory_percent:
            return max(10 * self.memory_percent, cores)
        mib = self.memory_mib or self.memory_units * device.unit_mib or device.memory_mib
        return max(-(-1000 * mib // max(device.memory_mib, 1)), cores)


class TypicalKind(NamedTuple):
    """A kind, and which part of the typical pods is of it."""

    kind: PodKind
    part: float


class Workload:
    """Decayed counts of the kinds of pods; `version` rises when the typical kinds change."""

    def __init__(self) -> None:
        self.typical: tuple[TypicalKind, ...] = ()
        """The typical kinds of pods with GPUs, the most frequent first."""
        self.version = 0
        self._counts: dict[PodKind, float] = {}
        self._weight = 1.0
        self._pods = 0
        self._refresh_at = FIRST_REFRESH

    def learn(self, request: PodRequest) -> None:
        """Count a pod that arrived."""
        if not request.containers:
            return
        kind = kind_of(request)
        self._counts[kind] = self._counts.get(kind, 0.0) + self._weight
        self._weight *= GROWTH
        self._pods += 1
        if self._pods >= self._refresh_at or not self.typical:
            self._refresh()

    def _refresh(self) -> None:
        self._refresh_at = self._pods + min(max(self._pods, FIRST_REFRESH), REFRESH_EVERY)
        ranked = sorted(self._counts.items(), key=lambda entry: -entry[1])[:MOST_KINDS]
        scale = self._weight if self._weight > RESCALE_ABOVE else 1.0
        self._weight /= scale
        self._counts = {kind: count / scale for kind, count in ranked}
        total = sum(self._counts.values())
        typical: list[tuple[PodKind, float]] = []
        covered = 0.0
        for kind, count in self._counts.items():
            if len(typical) == TYPICAL_KINDS or covered >= TYPICAL_PART * total:
                break
            typical.append((kind, count))
            covered += count
        self.typical = tuple(TypicalKind(kind, count / covered) for kind, count in typical)
        self.version += 1


def kind_of(request: PodRequest) -> PodKind:
    """Return the kind of a pod with GPUs."""
    resources, containers = request.resources, request.containers
    lead = containers[0]
    if len(containers) > 1:
        lead = max(containers, key=lambda container: container.gpus)
    percent, mib, units = lead.memory_percent or 0, 0, 0
    if lead.sharing is SharingPolicy.EXCLUSIVE:
        percent = ALL_PERCENT
    elif not percent and lead.memory_bytes is not None:
        mib = -(-lead.memory_bytes // MIB)
    elif not percent:
        units = lead.memory_units or 0
    return PodKind(
        resources.get("cpu", 0),
        resources.get("memory", 0),
        lead.gpus,
        percent,
        mib,
        units,
        lead.cores_percent,
        request.selection,
    )
