"""Leases that may end early for other pods, and the cost of that; pure."""

from collections import Counter
from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass

from shared.model.leases.lease import Lease, bookings
from shared.model.leases.ledger import NodeTotals
from shared.model.names import PodUid

Cost = tuple[tuple[int, ...], int, float, float, tuple[str, ...]]
"""Worst tier, leases, GPU-seconds used, minus the creation time of the oldest lease, names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndableLease:
    lease: Lease
    used_gpu_s: float
    tier: tuple[int, ...] = ()
    """Less is better to end."""


Endables = tuple[EndableLease, ...]


def cost_of(ends: Collection[EndableLease]) -> Cost:
    if len(ends) == 1:  # as are nearly all sets that are compared in a large cluster
        [end] = ends
        lease = end.lease
        name = f"{lease.namespace}/{lease.name}"
        return (end.tier, 1, round(end.used_gpu_s, 3), -lease.created_at, (name,))
    return (
        max(end.tier for end in ends),
        len(ends),
        round(sum(end.used_gpu_s for end in ends), 3),
        -min(end.lease.created_at for end in ends),
        tuple(sorted(f"{end.lease.namespace}/{end.lease.name}" for end in ends)),
    )


def gpus_by_lease(totals: NodeTotals) -> dict[PodUid, float]:
    """Return the GPUs of each lease: per device the larger part of memory or cores."""
    memory = {device.uuid: max(1, device.memory_mib) for device, _ in totals.node.devices}
    return {
        lease.pod: sum(
            max(
                booking.cores_percent / 100,
                booking.memory_mib / memory.get(booking.device, 1 << 62),
            )
            for booking in bookings(lease.shares)
        )
        for lease in totals.leases
    }


def used_gpu_s(lease: Lease, gpus: float, now: float) -> float:
    return gpus * max(0.0, now - lease.created_at)


def needs_others(lease: Lease) -> bool:
    return bool(lease.gang) and lease.gang_min > 1


class EndingGangs:
    """Which leases end together: a gang as a whole, or so few pods that its minimum stays.

    For example, of a gang of which 6 pods run and 4 must, one or two may end; with a third, all do.
    The rest of the gang of a pod in `ending` stays: the API server may refuse those evictions.
    """

    def __init__(
        self, leases: Iterable[Lease], endables: Iterable[EndableLease], ending: Set[PodUid]
    ) -> None:
        self._pods = Counter[str]()
        staying = Counter[str]()
        minimum = dict[str, int]()
        for lease in leases:
            if needs_others(lease):
                self._pods[lease.gang] += 1
                staying[lease.gang] += lease.pod not in ending
                minimum[lease.gang] = max(lease.gang_min, minimum.get(lease.gang, 0))
        self._spare = {gang: staying[gang] - least for gang, least in minimum.items()}
        self._endable = dict[str, list[EndableLease]]()
        for endable in endables:
            if needs_others(endable.lease):
                self._endable.setdefault(endable.lease.gang, []).append(endable)

    def whole(self, ends: Endables) -> Endables | None:
        """Return these with what ends beside them, or None if some of that may not end."""
        gangs = [end.lease.gang for end in ends if needs_others(end.lease)]
        if not gangs:
            return ends
        whole = ends
        for gang, count in Counter(gangs).items():
            if count <= self._spare[gang]:
                continue
            endable = self._endable[gang]
            if len(endable) < self._pods[gang]:
                return None
            whole = (*[end for end in whole if end.lease.gang != gang], *endable)
        return whole
