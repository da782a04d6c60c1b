"""How much of a node's idle GPUs the typical kinds of pods can use; pure.

Two measures are added. For a random pod: the idle GPU of the devices that it could use, none if the
node has too little cpu or memory for it. And for each kind: the GPU that its pods use once the node
is filled with them. The first sees devices that are too small for most pods, the second also what
lack of cpu and memory leaves idle.
"""

from array import array
from bisect import bisect_right
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
LANE_BYTES = 4
"""Amounts of all kinds are lanes of one integer, so that those of devices are added in one step."""

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


class _WeighedKind(NamedTuple):
    """A typical kind that fits the devices, with its weights."""

    gpus: int
    cpu: int
    """Twice the request; 1: none."""
    memory: int
    """Likewise."""
    filled: float
    """The second measure for each pod."""
    at_random: float
    """The first measure for each thousandth of a device that is idle."""


class UsableGpu:
    """The valuation of nodes with devices of one model, by the typical kinds of pods."""

    def __init__(self, typical: Sequence[TypicalKind], device: Device) -> None:
        requests = [_PartRequest.of(each, device) for each in typical]
        total = sum(map(attrgetter("weight"), requests)) or 1.0
        usable = sorted(filter(attrgetter("fits"), requests), key=attrgetter("part"))
        scale = (1 - RANDOM_POD_PART) / total
        self._kinds = [
            _WeighedKind(
                each.kind.gpus,
                2 * each.kind.cpu or 1,
                2 * each.kind.memory or 1,
                scale * each.weight * each.kind.gpus * each.part,
                RANDOM_POD_PART * each.frequency,
            )
            for each in usable
        ]
        self._parts = [each.part for each in usable]
        """In ascending order."""
        self._shares: dict[int, tuple[int, int]] = {}
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
        kinds = self._kinds[: bisect_right(self._parts, free[-1])] if free else []
        shares = idle = 0
        for part in free:
            more_shares, more_idle = self._shares.get(part) or self._shares_on(part)
            shares += more_shares
            idle += more_idle
        # Twice the amount plus one, divided by twice the request: no request divides by zero.
        cpu, memory = 2 * max(cpu * CPU_PERCENT // 100, 0) + 1, 2 * max(memory, 0) + 1
        value = 0.0
        lanes = zip(self._unpacked(shares), self._unpacked(idle), kinds, strict=False)
        for count, idle_parts, (gpus, cpu_each, memory_each, filled, at_random) in lanes:
            pods = count // gpus
            if pods * cpu_each > cpu:
                pods = cpu // cpu_each
            if pods * memory_each > memory:
                pods = memory // memory_each
            if pods:
                value += pods * filled + idle_parts * at_random
        return value

    def _shares_on(self, free: int) -> tuple[int, int]:
        """Return what a device with an idle part adds for each kind, in lanes of an integer.

        The shares of kinds with one GPU that it holds, or 1 if it holds one of several; and its
        idle part if it holds one.
        """
        counts = [
            0 if part > free else free // max(part, 1) if kind.gpus == 1 else 1
            for part, kind in zip(self._parts, self._kinds, strict=True)
        ]
        idle = [free * (part <= free) for part in self._parts]
        found = self._shares[free] = _packed(counts), _packed(idle)
        return found

    def _unpacked(self, lanes: int) -> list[int]:
        data = lanes.to_bytes(LANE_BYTES * len(self._parts), "little")
        return memoryview(data).cast("I").tolist()


def _packed(amounts: Sequence[int]) -> int:
    return int.from_bytes(array("I", amounts).tobytes(), "little")
