"""A gang of three pods, and what its pods reserve and request."""

from collections.abc import Mapping
from dataclasses import replace

from msgspec import structs

from shared.ledger.leases import RedisLeases
from shared.model.events.pod_events import PodQueued
from shared.model.lease import Lease, bookings
from shared.model.ledger import Reservation
from shared.model.names import DeviceUuid
from shared.model.quota import QuotaUsage
from shared.model.request import Gang, SharingPolicy
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


def charge_of(lease: Lease, memory_mib: Mapping[DeviceUuid, int]) -> QuotaUsage:
    """Return the usage of a lease, given the memory of each device; 0 or none: unknown."""
    cores = milli = memory = 0
    held: dict[DeviceUuid, int] = {}
    for booking in bookings(lease.shares):
        size = memory_mib.get(booking.device, 0)
        part = core = 1000
        if size > 0 and booking.sharing is not SharingPolicy.EXCLUSIVE:
            part = min(1000, -(-1000 * booking.memory_mib // size))
            core = 10 * booking.cores_percent or part
        cores += core
        milli += max(core, part)
        memory += booking.memory_mib
        held[booking.device] = 1
    return QuotaUsage(cores_milli=cores, milli_gpu=milli, memory_mib=memory, devices=held)
