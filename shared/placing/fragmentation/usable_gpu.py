"""How much of a node's idle GPUs the typical kinds of pods can use; pure.

Two measures are added. For a random pod: the idle GPU of the devices that it could use, none if the
node has too little cpu or memory for it. And for each kind: the GPU that its pods use once the node
is filled with them. The first sees devices that are too small for most pods, the second also what
lack of cpu and memory leaves idle.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from shared.model.device import Device
from shared.placing.device_filters import device_excluded
from shared.placing.fragmentation.workload import PodKind, TypicalKind

RANDOM_POD_PART = 0.5
"""The weight of the first measure."""
SIZE_EXPONENT = 0.3
"""In the second, a kind counts by its frequency, times its GPUs to this power."""
CPU_PERCENT = 90
"""Of a node's idle cpu, so much is for pods with GPUs: others come that are not placed here."""
WHOLE = 1000
"""Thousandths of a device."""
CACHED_VALUES = 1 << 16
CACHED_PARTS = 1 << 12

FreeParts = tuple[int, ...]
"""The idle part of each device in thousandths, in ascending order."""


class _PartRequest(NamedTuple):
    """What a typical kind of pods requests of devices of one model."""

    kind: PodKind
    frequency: float
    part: int
    """Thousandths of each device."""
    weight: float
    fits: bool
    """It fits an idle device, and the pods' selection does not exclude it."""

    @classmethod
    def of(cls, typical: TypicalKind, device: Device) -> "_PartRequest":
        kind, frequency = typical
        part = kind.part_of(device)
        gpus = kind.gpus * min(part, WHOLE) / WHOLE
        fits = part <= WHOLE and device_excluded(kind.selection, device) is None
        return cls(kind, frequency, part, frequency * gpus**SIZE_EXPONENT, fits)


class UsableGpu:
    """The valuation of nodes with devices of one model, by the typical kinds of pods."""

    def __init__(self, typical: Sequence[TypicalKind], device: Device) -> None:
        requests = [_PartRequest.of(each, device) for each in typical]
        total = sum(map(attrgetter("weight"), requests)) or 1.0
        usable = list(filter(attrgetter("fits"), requests))
        # Twice the amount plus one, divided by twice the request: no request divides by zero.
        self._cpu = [2 * each.kind.cpu or 1 for each in usable]
        self._memory = [2 * each.kind.memory or 1 for each in usable]
        scale = (1 - RANDOM_POD_PART) / total
        self._filled = [scale * each.weight * each.kind.gpus * each.part for each in usable]
        self._random = [RANDOM_POD_PART * each.frequency for each in usable]
        self._requests = [(each.kind.gpus, each.part) for each in usable]
        self._by_free_parts: dict[FreeParts, tuple[list[int], list[float]]] = {}
        self._values: dict[tuple[int, int, FreeParts], float] = {}

    def value(self, cpu: int, memory: int, free: FreeParts) -> float:
        """Return the thousandths of a GPU that typical pods can use, by a node's free amounts."""
        key = (cpu, memory, free)
        value = self._values.get(key)
        if value is None:
            if len(self._values) >= CACHED_VALUES:
                self._values.clear()
            value = self._values[key] = self._compute(cpu, memory, free)
        return value

    def _compute(self, cpu: int, memory: int, free: FreeParts) -> float:
        known = self._by_free_parts.get(free)
        if known is None:
            if len(self._by_free_parts) >= CACHED_PARTS:
                self._by_free_parts.clear()
            known = self._by_free_parts[free] = self._pods_by_devices(free)
        by_devices, random_part = known
        cpu, memory = 2 * max(cpu * CPU_PERCENT // 100, 0) + 1, 2 * max(memory, 0) + 1
        by_cpu = [cpu // each for each in self._cpu]
        by_memory = [memory // each for each in self._memory]
        pods = map(min, by_devices, by_cpu, by_memory)
        values: list[float] = [
            count * filled + at_random
            for count, filled, at_random in zip(pods, self._filled, random_part, strict=True)
            if count
        ]
        return sum(values)

    def _pods_by_devices(self, free: FreeParts) -> tuple[list[int], list[float]]:
        """Return the pods of each kind that the devices hold, and the first measure's value."""
        counts: dict[tuple[int, int], tuple[int, int]] = {}
        for gpus, part in self._requests:
            if (gpus, part) not in counts:
                usable = [each for each in free if each >= part]
                pods = (
                    sum(each // max(part, 1) for each in usable)
                    if gpus == 1
                    else len(usable) // gpus
                )
                counts[gpus, part] = (pods, sum(usable))
        pairs = [counts[request] for request in self._requests]
        values = [weight * usable for weight, (_, usable) in zip(self._random, pairs, strict=True)]
        return [pods for pods, _ in pairs], values
