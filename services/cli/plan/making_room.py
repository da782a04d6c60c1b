"""The fewest leases whose end would make room for a pod on one node; pure."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice

from services.binder.preempt.plan import used_gpu_s, without
from shared.model.lease import Lease, Share
from shared.model.ledger import LedgerNode, NodeTotals
from shared.model.request import PodRequest
from shared.placing.node_fit import fit_on_node

MAX_LEASES = 4
"""Larger sets of leases are not tried."""
MAX_TRIALS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a pod would get on a node without some of its leases."""

    node: LedgerNode
    """The node without them."""
    shares: tuple[Share, ...]
    leases: tuple[Lease, ...]
    used_gpu_s: float
    """GPU-seconds that these leases have used."""


def rooms_for(
    request: PodRequest,
    nodes: Sequence[NodeTotals],
    may_end: Callable[[Lease], bool],
    *,
    now: float,
) -> Iterator[Room]:
    """Yield room for a pod: with the fewest leases first, then with the least GPU time used.

    At most `MAX_TRIALS` sets are tried.
    """
    able = [
        (node, leases)
        for node in sorted(nodes, key=lambda totals: totals.node.facts.name)
        if (leases := [lease for lease in node.leases if may_end(lease)])
        and fit_on_node(request, without(node, {lease.pod for lease in leases})) is not None
    ]
    left = MAX_TRIALS
    for size in range(1, MAX_LEASES + 1):
        one_device = _needs_one_device(request)
        sets = (
            (node, ending)
            for node, leases in able
            for ending in _sets_of(leases, size, one_device=one_device)
        )
        tried = list(islice(sets, left))
        rooms = [room for each in tried if (room := _room(request, *each, now)) is not None]
        yield from sorted(rooms, key=lambda room: (room.used_gpu_s, room.node.facts.name))
        left -= len(tried)


def _room(
    request: PodRequest, node: NodeTotals, ending: tuple[Lease, ...], now: float
) -> Room | None:
    emptied = without(node, {lease.pod for lease in ending})
    shares = fit_on_node(request, emptied)
    if shares is None:
        return None
    devices = [device for device, _ in node.node.devices]
    used = sum(used_gpu_s(lease, devices, now) for lease in ending)
    return Room(node=emptied, shares=shares, leases=ending, used_gpu_s=used)


def _needs_one_device(request: PodRequest) -> bool:
    return request.same_device or sum(container.gpus for container in request.containers) == 1


def _sets_of(
    leases: Iterable[Lease], size: int, *, one_device: bool
) -> Iterator[tuple[Lease, ...]]:
    """Yield the sets of a size; those on one device, if that is where the pod needs room."""
    ordered = sorted(leases, key=lambda lease: lease.pod)
    for chosen in combinations(ordered, size):
        if not one_device or frozenset.intersection(*map(_devices_of, chosen)):
            yield chosen


def _devices_of(lease: Lease) -> frozenset[str]:
    return frozenset(share.device for share in lease.shares)
