"""Which of several checks of devices excludes nodes that do not fit, to explain it; pure."""

from collections.abc import Callable, Hashable, Iterable

from shared.model.requests.request import PodRequest, SharingPolicy
from shared.placing.choice.device_refusals import NODE_TEXTS
from shared.placing.index.threshold_column import NodeSet, ThresholdColumn
from shared.placing.mirror.node_mirror import MirroredNode

Amount = Callable[[MirroredNode], int]
Column = Callable[[Hashable, Amount], ThresholdColumn]
"""The column of an amount, by a key."""
CORES_STEP = 10
Reason = tuple[str, str]
"""Code and text, without numbers: nodes are counted by it."""
Excluded = dict[Reason, NodeSet]


def count_of_devices(*, slotted: bool) -> Amount:
    if slotted:
        return lambda node: len([d for d in node.devices if d.healthy and d.shares < d.slots])
    return lambda node: len([d for d in node.devices if d.healthy])


def units_free_at_once(
    gpus: int, slotted: bool, cores: int, unclaimed: bool, spare: bool
) -> Amount:
    """`spare` requires that shares have not reserved all cores."""
    most_cores = 100 - cores

    def units_of(node: MirroredNode) -> int:
        free = [
            device.free_units
            for device in node.devices
            if device.used_cores <= most_cores
            and device.healthy
            and not (slotted and device.shares >= device.slots)
            and not (unclaimed and device.ledger_use.claimed_by)
            and not (spare and device.used_cores >= 100 and not device.exclusive)
        ]
        if len(free) < gpus:
            return -1
        if gpus == 1:
            return max(free)
        free.sort()
        return free[-gpus]

    return units_of


def with_devices(
    nodes: NodeSet,
    gpus: int,
    cores: int,
    units: int,
    column: Callable[[int, int], ThresholdColumn],
) -> NodeSet:
    """Look for one device with cores rounded down first.

    If no node has it, as for most pods that fit nowhere, other requests share that answer.
    """
    rounded = cores - cores % CORES_STEP or min(cores, 1)
    for least in dict.fromkeys(((1, rounded), (gpus, cores))):
        if nodes:
            nodes &= column(*least).at_least(units)
    return nodes


def keep(left: NodeSet, passing: NodeSet, reason: Reason, excluded: Excluded) -> NodeSet:
    failing = left & ~passing
    if failing:
        excluded[reason] = excluded.get(reason, 0) | failing
    return left ^ failing


def split_by_device_stages(
    request: PodRequest, left: NodeSet, excluded: Excluded, column: Column
) -> None:
    """Nodes that pass a stage pass those before it, so most skip the first four."""
    if not left:
        return
    [container] = request.containers
    gpus = container.gpus
    slotted = container.slotted
    cores = container.cores_percent
    units = container.memory_units or 0

    def with_units(
        nodes: NodeSet, cores: int, *, unclaimed: bool = False, spare: bool = False
    ) -> NodeSet:
        def free(gpus: int, cores: int) -> ThresholdColumn:
            amount_of = units_free_at_once(gpus, slotted, cores, unclaimed, spare)
            return column(("units", gpus, slotted, cores, unclaimed, spare), amount_of)

        return with_devices(nodes, gpus, cores, units, free)

    enough = with_units(left, 0)
    _split_by_number_of_devices(gpus, slotted, left ^ enough, excluded, column)
    passing = with_units(enough, cores)
    code = "InsufficientGpuCores"
    enough = keep(enough, passing, (code, NODE_TEXTS[code]), excluded)
    passing = with_units(enough, cores, unclaimed=True)
    enough = keep(enough, passing, ("GpuClaimed", NODE_TEXTS["GpuClaimed"]), excluded)
    if container.sharing is not SharingPolicy.BEST_EFFORT:
        passing = with_units(enough, cores, unclaimed=True, spare=True)
        code = "GpuCoresReserved"
        enough = keep(enough, passing, (code, NODE_TEXTS[code]), excluded)
    keep(enough, 0, ("GpuInExclusiveUse", NODE_TEXTS["GpuInExclusiveUse"]), excluded)


def _split_by_number_of_devices(
    gpus: int, slotted: bool, left: NodeSet, excluded: Excluded, column: Column
) -> None:
    code = "InsufficientGpuMemory"
    stages: Iterable[tuple[Hashable, Amount, int, str]] = (
        (("slots", slotted), count_of_devices(slotted=slotted), gpus, "GpuSlotsTaken"),
        ("healthy", count_of_devices(slotted=False), gpus, "GpuUnhealthy"),
        ("devices", lambda node: len(node.devices), gpus, "NotEnoughGpus"),
        ("devices", lambda node: len(node.devices), 1, "NoGpus"),
    )
    for key, amount_of, threshold, failing_code in stages:
        if not left:
            return
        passing = column(key, amount_of).at_least(threshold)
        left = keep(left, ~passing, (code, NODE_TEXTS[code]), excluded)
        code = failing_code
    keep(left, 0, (code, NODE_TEXTS[code]), excluded)
