"""The fewest pods to move so that a waiting pod fits; pure."""

from collections.abc import Mapping, Sequence
from itertools import islice

from shared.model.leases.lease import Lease
from shared.model.leases.ledger import NodeTotals
from shared.model.names import NodeName, PodUid
from shared.model.requests.placement import Placement
from shared.model.requests.request import PodRequest
from shared.model.views.plans import PlannedShare, ProtectedPod
from shared.model.views.preemptions import PlacingView
from shared.model.views.view import View
from shared.placing.index.no_fit import NoFit
from shared.placing.room import ClusterTrials, Room, rooms_by_few
from shared.placing.starts import with_claims
from shared.placing.trial_cluster import TrialCluster

MAX_ROOMS = 500
_WANTED = PodUid("the waiting pod")


class Move(View, frozen=True, kw_only=True, rename={"from_": "from"}):
    """A pod that is evicted, and where its replacement fits."""

    pod: str
    uid: PodUid
    from_: NodeName
    to: NodeName
    shares: tuple[PlannedShare, ...]
    running_s: int


class MovePlan(View, frozen=True, kw_only=True):
    """What the waiting pod gets on a node once pods have moved."""

    node: NodeName
    shares: tuple[PlannedShare, ...]
    moves: tuple[Move, ...] = ()
    """Empty if it fits as it is."""
    gpu_s_used: float = 0.0


class DefragView(View, frozen=True, kw_only=True):
    pod: str
    plan: MovePlan | None
    stays: tuple[ProtectedPod, ...]


def nodes_for(pod: PodUid, placing: PlacingView) -> list[NodeTotals]:
    """The planned start of the pod itself claims nothing."""
    starts = placing.preemptions.starts
    own = [start for start in starts if pod in start.pods]
    return with_claims(placing.nodes, [start for start in starts if start not in own], own)


def plan_moves(
    request: PodRequest,
    nodes: Sequence[NodeTotals],
    requests: Mapping[PodUid, PodRequest],
    *,
    now: float,
) -> MovePlan | None:
    """Return the plan with the fewest moves, and then the least GPU time used, if any.

    Only pods with `requests` may be moved.
    """
    trials = ClusterTrials(nodes)
    place = trials.cluster.place(_WANTED, request)
    if isinstance(place, Placement):
        return MovePlan(node=place.node, shares=PlannedShare.of(place.shares))
    rooms = rooms_by_few(request, trials, lambda lease: lease.pod in requests, now=now)
    for room in islice(rooms, MAX_ROOMS):
        moves = _moves(request, room, requests, trials.cluster, now=now)
        if moves is not None:
            return MovePlan(
                node=room.placement.node,
                shares=PlannedShare.of(room.placement.shares),
                moves=moves,
                gpu_s_used=round(room.used_gpu_s, 3),
            )
    return None


def _moves(
    request: PodRequest,
    room: Room,
    requests: Mapping[PodUid, PodRequest],
    cluster: TrialCluster,
    *,
    now: float,
) -> tuple[Move, ...] | None:
    """Return None if not all pods fit elsewhere. Nothing is reserved."""
    cluster.reserve(_WANTED, request, room.placement)
    moves: list[Move] = []
    for lease in sorted(room.leases, key=_size, reverse=True):
        place = cluster.place(lease.pod, requests[lease.pod])
        if isinstance(place, NoFit):
            break
        moves.append(
            Move(
                pod=f"{lease.namespace}/{lease.name}",
                uid=lease.pod,
                from_=lease.node,
                to=place.node,
                shares=PlannedShare.of(place.shares),
                running_s=round(now - lease.created_at),
            )
        )
    for pod in (_WANTED, *(lease.pod for lease in room.leases)):
        cluster.remove(pod)
    return tuple(moves) if len(moves) == len(room.leases) else None


def _size(lease: Lease) -> tuple[int, int]:
    return len(lease.shares), sum(share.memory_mib for share in lease.shares)
