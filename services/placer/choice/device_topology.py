"""Which of the devices that fit lie well together: within one NUMA node, linked best.

The score of a set is the sum over its pairs of HAMi's pair score, as the agent measured it; where
links do not decide, the pairs on one NUMA node do; and where those do not, the order of trying.
"""

from collections.abc import Sequence
from itertools import combinations

from services.placer.mirror.node_mirror import DeviceState
from shared.model.request import GpuRequest, PodRequest, TopologyScope

TRIED_EXHAUSTIVELY = 8
"""Of more devices than this, sets are grown greedily from each: 8 over 4 are 70 sets."""
KEPT_SETS = 64
"""Choices remembered per node: pods of one template meet the same few."""

Places = tuple[int, ...]
"""Positions in a list of devices."""


def place_in(device: DeviceState, scope: TopologyScope) -> str | int | None:
    """Return which NUMA node or PCIe root a device is on; None: not known."""
    if scope is TopologyScope.NUMA:
        return device.device.numa
    return device.device.pcie or None


def matters(container: GpuRequest, request: PodRequest, devices: Sequence[DeviceState]) -> bool:
    """Say whether it makes a difference which of the fitting devices a container gets."""
    if container.gpus < 2:
        return False
    linked = request.prefer_links and bool(devices) and devices[0].node.linked
    return linked or request.topology_scope is not TopologyScope.NODE


def best_set(request: PodRequest, devices: Sequence[DeviceState], wanted: int) -> Places | None:
    """Return which `wanted` of the devices, given in order of trying, go best together.

    None: they are not within what the pod demands.
    """
    best: tuple[int, Places] | None = None
    for group in _groups(request.topology_scope, devices):
        if len(group) < wanted:
            continue
        score, places = 0, tuple(range(wanted))
        if request.prefer_links:
            score, places = _best_linked([devices[at] for at in group], wanted)
        if best is None or score > best[0]:
            best = score, tuple(group[at] for at in places)
    return best[1] if best else None


def _groups(scope: TopologyScope, devices: Sequence[DeviceState]) -> list[list[int]]:
    if scope is TopologyScope.NODE:
        return [list(range(len(devices)))]
    groups: dict[str | int | None, list[int]] = {}
    for at, device in enumerate(devices):
        groups.setdefault(place_in(device, scope), []).append(at)
    groups.pop(None, None)
    return list(groups.values())


def _best_linked(devices: Sequence[DeviceState], wanted: int) -> tuple[int, Places]:
    """Return the score and the places of the set that is linked best, the first among equals."""
    known = devices[0].node.sets
    key = (wanted, *[device.uuid for device in devices])
    found = known.get(key)
    if found is None:
        if len(known) >= KEPT_SETS:
            known.clear()
        exhaustively = len(devices) <= TRIED_EXHAUSTIVELY
        found = known[key] = (_of_all if exhaustively else _grown)(_pairs(devices), wanted)
    return found


Pairs = list[list[int]]


def _pairs(devices: Sequence[DeviceState]) -> Pairs:
    return [[_pair_score(one, other) for other in devices] for one in devices]


_NUMA_STEPS = 1 << 10
"""Links first: no set of devices has so many pairs on one NUMA node."""


def _pair_score(one: DeviceState, other: DeviceState) -> int:
    link = one.device.links.get(other.uuid, 0)
    if link != other.device.links.get(one.uuid, 0):
        link = 0
    near = one.device.numa is not None and one.device.numa == other.device.numa
    return link * _NUMA_STEPS + near


def _of_all(pairs: Pairs, wanted: int) -> tuple[int, Places]:
    sets = combinations(range(len(pairs)), wanted)
    return max(((_score(pairs, places), places) for places in sets), key=lambda found: found[0])


def _score(pairs: Pairs, places: Places) -> int:
    return sum(pairs[one][other] for one, other in combinations(places, 2))


def _grown(pairs: Pairs, wanted: int) -> tuple[int, Places]:
    """Grow a set from every device, always by the one that is linked best to those in it."""
    best: tuple[int, Places] = (-1, ())
    for seed in range(len(pairs)):
        places, gains = [seed], list(pairs[seed])
        while len(places) < wanted:
            left = (at for at in range(len(pairs)) if at not in places)
            added = max(left, key=gains.__getitem__)
            places.append(added)
            gains = [gain + more for gain, more in zip(gains, pairs[added], strict=True)]
        ordered = tuple(sorted(places))
        score = _score(pairs, ordered)
        if score > best[0]:
            best = score, ordered
    return best
