"""What a lease counts against a quota, computed without the ledger's scripts."""

from collections.abc import Mapping

from shared.model.lease import Lease, bookings
from shared.model.names import DeviceUuid
from shared.model.quota import WHOLE_MILLI, QuotaUsage
from shared.model.request import SharingPolicy


def charge_of(lease: Lease, memory_mib: Mapping[DeviceUuid, int]) -> QuotaUsage:
    """Return the usage of a lease, given the memory of each device; 0 or none: unknown."""
    cores = milli = memory = 0
    held: dict[DeviceUuid, int] = {}
    for booking in bookings(lease.shares):
        size = memory_mib.get(booking.device, 0)
        part = core = WHOLE_MILLI
        if size > 0 and booking.sharing is not SharingPolicy.EXCLUSIVE:
            part = min(WHOLE_MILLI, -(-WHOLE_MILLI * booking.memory_mib // size))
            core = 10 * booking.cores_percent or part
        cores += core
        milli += max(core, part)
        memory += booking.memory_mib
        held[booking.device] = 1
    return QuotaUsage(cores_milli=cores, milli_gpu=milli, memory_mib=memory, devices=held)
