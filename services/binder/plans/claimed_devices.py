"""Reservations of devices that a plan has claimed for waiting pods."""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import structs

from shared.ledger.leases import RedisLeases
from shared.model.devices.node import NodeFacts
from shared.model.events.pod_events import PlacementChosen, PodQueued
from shared.model.leases.lease import Lease
from shared.model.leases.ledger import AlreadyLeased, Reservation, ReservedLease, WaitingPod
from shared.model.names import PodUid
from shared.model.requests.request import Gang
from shared.placing.anti_affinity import Domain, all_domains, repelled_request
from shared.placing.node_filters import check_anti_affinity

RESERVATION_S = 30.0
"""How long reservations for a planned start last if this binder dies before it commits them."""


async def reserve_claimed(
    ledger: RedisLeases,
    wanted: Sequence[Reservation],
    waiting: Iterable[WaitingPod],
    *,
    gang: Gang | None = None,
    now: float,
) -> dict[PodUid, PlacementChosen | str]:
    """Reserve what is claimed for waiting pods, once it is free: for all of a gang, or for none.

    Returns their placements, or why a pod cannot run there. A pod of which something is not free
    yet is left out.
    """
    nodes = {reservation.pod: reservation.candidates[0].node for reservation in wanted}
    cluster = await ledger.snapshot_around({*nodes.values()})
    facts = {node.facts.name: node.facts for node in cluster.nodes}
    repelling = all_domains(facts.values())
    repelled: dict[PodUid, PlacementChosen | str] = {
        pod.queued.pod: f"the anti-affinity of another pod keeps it off node {node}"
        for pod in waiting
        if (node := nodes[pod.queued.pod]) in facts
        and _is_repelled(pod.queued, facts[node], repelling)
    }
    left = [
        structs.replace(reservation, read_version=cluster.version)
        for reservation in wanted
        if reservation.pod not in repelled
    ]
    if gang is None:
        outcomes = await ledger.reserve(left, now=now, ttl_s=RESERVATION_S)
    elif not repelled:
        outcomes = await ledger.reserve_gang(gang, left, now=now, ttl_s=RESERVATION_S)
    else:
        outcomes = []
    leases = [
        outcome.lease for outcome in outcomes if isinstance(outcome, ReservedLease | AlreadyLeased)
    ]
    return repelled | {lease.pod: placement_of(lease) for lease in leases}


def placements_among(results: Mapping[PodUid, PlacementChosen | str]) -> list[PlacementChosen]:
    return [result for result in results.values() if isinstance(result, PlacementChosen)]


def placement_of(lease: Lease) -> PlacementChosen:
    return PlacementChosen(lease=lease, trace=lease.trace)


def _is_repelled(pod: PodQueued, facts: NodeFacts, repelling: Sequence[Domain]) -> bool:
    """Return whether required anti-affinity came to the node after it was chosen."""
    needs = repelled_request(pod, repelling).node_requirements
    return check_anti_affinity(needs, facts) is not None
