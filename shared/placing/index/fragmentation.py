"""The cost of a placement: idle GPU that typical pods can use before it and not after; pure.

What they can use of a node is a sum: the idle GPU of devices that a random pod could use, and the
GPU that each kind uses on the node filled with it. The first sees devices too small for most pods,
the second what lack of cpu and memory wastes.
"""

from array import array
from bisect import bisect_right, insort
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from shared.model.devices.device import MIB, Device, required_cores_percent
from shared.model.requests.request import (
    ALL_PERCENT,
    DeviceSelection,
    NodeOrder,
    PodRequest,
    SharingPolicy,
)
from shared.placing.choice.container_choice import DevicePick
from shared.placing.choice.device_choice import device_excluded
from shared.placing.mirror.cluster_mirror import ChangeReader, ClusterMirror
from shared.placing.mirror.node_mirror import MirroredDevice, MirroredNode

HALF_LIFE = 8192
"""After so many pods, a pod counts half."""
GROWTH = 2 ** (1 / HALF_LIFE)
RESCALE_ABOVE = 1e9
MOST_KINDS = 1024
TYPICAL_PART = 0.95
TYPICAL_KINDS = 64
"""Typical kinds are the most frequent, up to so many and to that part of all pods."""
FIRST_REFRESH = 16
REFRESH_EVERY = 512
"""Typical kinds are chosen when the number of pods has doubled, and after so many."""


class PodKind(NamedTuple):
    """Of several containers the one with the most GPUs counts."""

    cpu: int
    """Thousandths."""
    memory: int
    """Bytes."""
    gpus: int
    memory_percent: int
    """0 if `memory_mib` or `memory_units` counts."""
    memory_mib: int
    memory_units: int
    """Units of the node. All memory is meant if this, the MiB and the percentage are 0."""
    cores_percent: int
    selection: DeviceSelection

    def part_of(self, device: Device) -> int:
        """1000 or more is all of the device."""
        cores = 10 * self.cores_percent
        if self.memory_percent:
            return max(10 * self.memory_percent, cores)
        mib = self.memory_mib or self.memory_units * device.unit_mib or device.memory_mib
        return max(-(-1000 * mib // max(device.memory_mib, 1)), cores)


class TypicalKind(NamedTuple):
    kind: PodKind
    part: float


class Workload:
    """`version` rises when the typical kinds change."""

    def __init__(self) -> None:
        self.typical: tuple[TypicalKind, ...] = ()
        """The typical kinds of pods with GPUs, the most frequent first."""
        self.version = 0
        self._counts: dict[PodKind, float] = {}
        self._weight = 1.0
        self._pods = 0
        self._refresh_at = FIRST_REFRESH

    def learn(self, request: PodRequest) -> None:
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
    resources = request.resources
    containers = request.containers
    lead = containers[0]
    if len(containers) > 1:
        lead = max(containers, key=lambda container: container.gpus)
    percent = lead.memory_percent or 0
    mib = 0
    units = 0
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


RANDOM_POD_PART = 0.5
"""The weight of what a random pod can use."""
SIZE_EXPONENT = 0.3
"""A kind's weight on a filled node is its frequency times its GPUs to this power."""
CPU_PERCENT = 90
"""The rest of a node's idle cpu is for pods without GPUs, which are not placed here."""
WHOLE = 1000
CACHED_VALUES = 1 << 16
LANE_BYTES = 4
"""Amounts of all kinds are lanes of one integer, so that one addition sums them."""

FreeParts = tuple[int, ...]
"""Thousandths of each device that are idle, ascending."""


class _PartRequest(NamedTuple):
    kind: PodKind
    frequency: float
    part: int
    weight: float
    fits: bool
    """It fits an idle device that the pods' selection does not exclude."""

    @classmethod
    def of(cls, typical: TypicalKind, device: Device) -> "_PartRequest":
        kind, frequency = typical
        part = kind.part_of(device)
        gpus = kind.gpus * min(part, WHOLE) / WHOLE
        fits = part <= WHOLE and device_excluded(kind.selection, device) is None
        return cls(kind, frequency, part, frequency * gpus**SIZE_EXPONENT, fits)


class _WeighedKind(NamedTuple):
    gpus: int
    cpu: int
    """Twice the request; 1 if there is none."""
    memory: int
    """As `cpu`."""
    filled: float
    """Weight for each pod on a filled node."""
    at_random: float
    """Weight for each idle thousandth of a device."""


class UsableGpu:
    def __init__(self, typical: Sequence[TypicalKind], device: Device) -> None:
        requests = [_PartRequest.of(kind, device) for kind in typical]
        total = sum(map(attrgetter("weight"), requests)) or 1.0
        usable = sorted(filter(attrgetter("fits"), requests), key=attrgetter("part"))
        scale = (1 - RANDOM_POD_PART) / total
        self._kinds = [
            _WeighedKind(
                request.kind.gpus,
                2 * request.kind.cpu or 1,
                2 * request.kind.memory or 1,
                scale * request.weight * request.kind.gpus * request.part,
                RANDOM_POD_PART * request.frequency,
            )
            for request in usable
        ]
        self._parts = [request.part for request in usable]
        """In ascending order."""
        self._shares: dict[int, tuple[int, int]] = {}
        self._values: dict[tuple[int, int, FreeParts], float] = {}

    def value(self, cpu: int, memory: int, free: FreeParts) -> float:
        key = (cpu, memory, free)
        value = self._values.get(key)
        if value is None:
            if len(self._values) >= CACHED_VALUES:
                self._values.clear()
            value = self._values[key] = self._compute(cpu, memory, free)
        return value

    def _compute(self, cpu: int, memory: int, free: FreeParts) -> float:
        kinds = self._kinds[: bisect_right(self._parts, free[-1])] if free else []
        shares = 0
        idle = 0
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
        """Return what a device adds for each kind, in lanes of an integer.

        These are the shares it holds (1 for kinds with several GPUs), and its idle part if it holds
        one.
        """
        counts = [
            0 if part > free else free // max(part, 1) if kind.gpus == 1 else 1
            for part, kind in zip(self._parts, self._kinds, strict=True)
        ]
        idle = [free * (part <= free) for part in self._parts]
        shares = self._shares[free] = _packed(counts), _packed(idle)
        return shares

    def _unpacked(self, lanes: int) -> list[int]:
        data = lanes.to_bytes(LANE_BYTES * len(self._parts), "little")
        return memoryview(data).cast("I").tolist()


def _packed(amounts: Sequence[int]) -> int:
    return int.from_bytes(array("I", amounts).tobytes(), "little")


class NodeValue:
    __slots__ = ("cpu", "free", "memory", "parts", "usable", "value")

    def __init__(self, node: MirroredNode, usable: UsableGpu) -> None:
        self.cpu = node.free_resources.get("cpu", 0)
        self.memory = node.free_resources.get("memory", 0)
        self.free = {device: free_part(device) for device in node.devices}
        self.parts = tuple(sorted(self.free.values()))
        self.usable = usable
        self.value = usable.value(self.cpu, self.memory, self.parts)


GPU_IDLE_PART = 1 / 8
PACKAGE_CPU = 32_000
PACKAGE_WATTS = 105
"""A CPU package of so many thousandths draws so many watts more once one is requested."""
WATT_COST = 2.0
"""The thousandths of a usable GPU that weigh as much as a watt."""


def added_watts(request: PodRequest, node: MirroredNode, picks: Sequence[DevicePick]) -> float:
    """Return the watts that the pod adds to a node.

    As in "Power- and Fragmentation-aware Online Scheduling for GPU Datacenters" (2024), a GPU draws
    all of its power with any lease, and a CPU package with any request.
    """
    idle = {device for _, device, _, _ in picks if free_part(device) == WHOLE}
    watts = (1 - GPU_IDLE_PART) * sum(device.device.power_limit_w for device in idle)
    used = node.facts.allocatable.get("cpu", 0) - node.free_resources.get("cpu", 0)
    needed = used + request.resources.get("cpu", 0)
    return watts + PACKAGE_WATTS * (-(-needed // PACKAGE_CPU) - -(-used // PACKAGE_CPU))


class Fragmentation:
    def __init__(self, mirror: ClusterMirror) -> None:
        self.workload = Workload()
        self._version = 0
        self._usable: dict[tuple[int, int, str], UsableGpu] = {}
        self._nodes: dict[MirroredNode, NodeValue] = {}
        self._changes = ChangeReader(mirror.changes)

    def cost(self, request: PodRequest, node: MirroredNode, picks: Sequence[DevicePick]) -> float:
        """Return the thousandths of a GPU that typical pods can use before and not after.

        For the policy power, added watts count, too.
        """
        if request.node_order is not NodeOrder.POWER:
            return self._lost(request, node, picks)
        return self._lost(request, node, picks) + WATT_COST * added_watts(request, node, picks)

    def _lost(self, request: PodRequest, node: MirroredNode, picks: Sequence[DevicePick]) -> float:
        if not node.devices or not self.workload.typical:
            return 0.0
        before = self._nodes.get(node) or self._value_of(node)
        free = before.free.copy()
        parts = list(before.parts)
        for container, device, memory_mib, _ in picks:
            part = -(-WHOLE * memory_mib // (device.total_mib or 1))
            part = max(part, 10 * required_cores_percent(container))
            alone = container.sharing is SharingPolicy.EXCLUSIVE
            parts.remove(free[device])
            free[device] = 0 if alone or part > free[device] else free[device] - part
            insort(parts, free[device])
        resources = request.resources
        after = before.usable.value(
            before.cpu - resources.get("cpu", 0),
            before.memory - resources.get("memory", 0),
            tuple(parts),
        )
        return before.value - after

    def catch_up(self) -> None:
        if self._version != self.workload.version:
            self._version = self.workload.version
            self._usable.clear()
            self._nodes.clear()
        changed = self._changes.read()
        if changed is None:
            self._nodes.clear()
            return
        for node in changed:
            self._nodes.pop(node, None)

    def _value_of(self, node: MirroredNode) -> NodeValue:
        device = node.devices[0].device
        key = (device.memory_mib, device.unit_mib, device.model)
        usable = self._usable.get(key)
        if usable is None:
            usable = self._usable[key] = UsableGpu(self.workload.typical, device)
        value = self._nodes[node] = NodeValue(node, usable)
        return value


def free_part(device: MirroredDevice) -> int:
    if device.in_mig_mode:
        return WHOLE * device.free_instance_mib // max(device.total_mib, 1)
    if device.free_slot_cores <= 0:
        return 0
    return max(
        0,
        min(
            WHOLE * device.free_units * device.unit_mib // device.total_mib,
            10 * device.free_slot_cores,
        ),
    )
