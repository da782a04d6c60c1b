"""The topology of a node's devices: those with the best links, or on one NUMA node; pure.

The score of a set is the sum over its pairs of HAMi's pair score, as the node agent measured it.
Where links do not decide, the number of pairs on one NUMA node does; then the order of trying.
"""

from collections.abc import Sequence
from itertools import combinations

from shared.model.request import GpuRequest, PodRequest, TopologyScope
from shared.placing.mirror.node_mirror import MirroredDevice

EXHAUSTIVE_DEVICES = 8
"""With more devices than this, sets grow greedily from each: 4 of 8 devices are 70 sets."""
CACHED_SETS = 64
"""Cached choices per node."""

Positions = tuple[int, ...]
"""Positions in a list of devices."""


def topology_location(device: MirroredDevice, scope: TopologyScope) -> str | int | None:
    """Return the NUMA node or PCIe root of a device; None: not known."""
    if scope is TopologyScope.NUMA:
        return device.device.numa
    return device.device.pcie or None


def topology_matters(
    container: GpuRequest, request: PodRequest, devices: Sequence[MirroredDevice]
) -> bool:
    """Return whether it makes a difference which of the fitting devices a container gets."""
    if container.gpus < 2:
        return False
    by_links = request.prefer_links and bool(devices) and devices[0].node.has_topology
    return by_links or request.topology_scope is not TopologyScope.NODE


def best_linked_set(
    request: PodRequest, devices: Sequence[MirroredDevice], wanted: int
) -> Positions | None:
    """Return which `wanted` of the devices, given in order of trying, are linked best.

    Return None if no set lies within the topology scope of the pod.
    """
    best: tuple[int, Positions] | None = None
    for group in _groups(request.topology_scope, devices):
        if len(group) < wanted:
            continue
        score, positions = 0, tuple(range(wanted))
        if request.prefer_links:
            score, positions = _best_linked([devices[at] for at in group], wanted)
        if best is None or score > best[0]:
            best = score, tuple(group[at] for at in positions)
    return best[1] if best else None


def _groups(scope: TopologyScope, devices: Sequence[MirroredDevice]) -> list[list[int]]:
    """Group positions of devices by location within the scope."""
    if scope is TopologyScope.NODE:
        return [list(range(len(devices)))]
    groups: dict[str | int | None, list[int]] = {}
    for position, device in enumerate(devices):
        groups.setdefault(topology_location(device, scope), []).append(position)
    groups.pop(None, None)
    return list(groups.values())


def _best_linked(devices: Sequence[MirroredDevice], wanted: int) -> tuple[int, Positions]:
    """Return the score and the positions of the best linked set, the first among equals."""
    cache = devices[0].node.linked_sets
    key = (wanted, *[device.uuid for device in devices])
    best = cache.get(key)
    if best is None:
        if len(cache) >= CACHED_SETS:
            cache.clear()
        search = _best_of_all if len(devices) <= EXHAUSTIVE_DEVICES else _best_grown
        best = cache[key] = search(_pair_scores(devices), wanted)
    return best


PairScores = list[list[int]]


def _pair_scores(devices: Sequence[MirroredDevice]) -> PairScores:
    return [[_pair_score(one, other) for other in devices] for one in devices]


_LINK_WEIGHT = 1 << 10
"""Links come before NUMA nodes: no set of devices has so many pairs on one NUMA node."""


def _pair_score(one: MirroredDevice, other: MirroredDevice) -> int:
    link = one.device.links.get(other.uuid, 0)
    if link != other.device.links.get(one.uuid, 0):
        link = 0
    same_numa = one.device.numa is not None and one.device.numa == other.device.numa
    return link * _LINK_WEIGHT + same_numa


def _best_of_all(scores: PairScores, wanted: int) -> tuple[int, Positions]:
    sets = combinations(range(len(scores)), wanted)
    return max(
        ((_set_score(scores, positions), positions) for positions in sets),
        key=lambda scored: scored[0],
    )


def _set_score(scores: PairScores, positions: Positions) -> int:
    return sum(scores[one][other] for one, other in combinations(positions, 2))


def _best_grown(scores: PairScores, wanted: int) -> tuple[int, Positions]:
    """Grow a set from every device, always by the device that is linked best to the set."""
    best: tuple[int, Positions] = (-1, ())
    for seed in range(len(scores)):
        positions, gains = [seed], list(scores[seed])
        while len(positions) < wanted:
            left = (position for position in range(len(scores)) if position not in positions)
            added = max(left, key=gains.__getitem__)
            positions.append(added)
            gains = [gain + more for gain, more in zip(gains, scores[added], strict=True)]
        ordered = tuple(sorted(positions))
        score = _set_score(scores, ordered)
        if score > best[0]:
            best = score, ordered
    return best
