"""A gang of three pods, and what its pods reserve and request."""

from dataclasses import replace

from msgspec import structs

from shared.ledger.leases import RedisLeases
from shared.model.events.pod_events import PodQueued
from shared.model.ledger import Reservation
from shared.model.request import Gang
from tests.support.placer.ledger import NOW, queued, reservation, share

GANG = Gang(name="default/g", min_member=3)


def member(pod: str, gpu: int = 0, mib: int = 4_000) -> Reservation:
    """A reservation of a pod of the gang on node a."""
    return replace(reservation(pod, share("a", gpu, mib)), gang=GANG.name)


def in_gang(pod: str, units: int = 4_000, gang: Gang = GANG) -> PodQueued:
    """A queued pod of a gang."""
    event = queued(pod, units=units)
    return replace(event, request=structs.replace(event.request, gang=gang))


async def reserve_gang(leases: RedisLeases, *wanted: Reservation) -> list[type]:
    """Reserve for all or none; return the types of the outcomes."""
    outcomes = await leases.reserve_gang(GANG, wanted, now=NOW, ttl_s=30)
    return [type(outcome) for outcome in outcomes]
