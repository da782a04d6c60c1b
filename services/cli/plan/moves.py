"""The fewest pods to move so that a waiting pod fits; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from shared.model.lease import Lease, Share
from shared.model.ledger import NodeTotals
from shared.model.names import NodeName, PodUid
from shared.model.placement import Placement, Refusal
from shared.model.request import PodRequest
from shared.placing.room import ClusterTrials, Room, rooms_by_few
from shared.placing.trial_cluster import TrialCluster

MAX_ROOMS = 500
"""Sets of leases for whose pods other places are tried."""
_WANTED = PodUid("the waiting pod")


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A pod that is evicted, and where its replacement fits."""

    lease: Lease
    to: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class MovePlan:
    """What the waiting pod gets on a node once pods have moved."""

    node: NodeName
    shares: tuple[Share, ...]
    moves: tuple[Move, ...]
    """Empty: it fits as it is."""
    used_gpu_s: float = 0.0
    """GPU-seconds that the moved pods have used."""


def plan_moves(
    request: PodRequest,
    nodes: Sequence[NodeTotals],
    requests: Mapping[PodUid, PodRequest],
    *,
    now: float,
) -> MovePlan | None:
    """Return the plan with the fewest moves, and then the least GPU time used, if any.

    `requests` are those of the pods that may be moved. A moved pod may get another device of the
    same node.
    """
    trials = ClusterTrials(nodes)
    found = trials.cluster.place(_WANTED, request)
    if isinstance(found, Placement):
        return MovePlan(node=found.node, shares=found.shares, moves=())
    rooms = rooms_by_few(request, trials, lambda lease: lease.pod in requests, now=now)
    for room in islice(rooms, MAX_ROOMS):
        moves = _moves(request, room, requests, trials.cluster)
        if moves is not None:
            return MovePlan(
                node=room.node, shares=room.shares, moves=moves, used_gpu_s=room.used_gpu_s
            )
    return None


def _moves(
    request: PodRequest, room: Room, requests: Mapping[PodUid, PodRequest], cluster: TrialCluster
) -> tuple[Move, ...] | None:
    """Place the pods that would end elsewhere, or return None if not all of them fit.

    Their leases have ended in the cluster. Reserves nothing.
    """
    cluster.reserve(_WANTED, request, Placement(node=room.node, shares=room.shares))
    moves: list[Move] = []
    for lease in sorted(room.leases, key=_size, reverse=True):
        found = cluster.place(lease.pod, requests[lease.pod])
        if isinstance(found, Refusal):
            break
        moves.append(Move(lease=lease, to=found))
    for pod in (_WANTED, *(lease.pod for lease in room.leases)):
        cluster.remove(pod)
    return tuple(moves) if len(moves) == len(room.leases) else None


def _size(lease: Lease) -> tuple[int, int]:
    return len(lease.shares), sum(share.memory_mib for share in lease.shares)
