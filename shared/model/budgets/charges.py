"""What shares count for a quota, as the ledger counts them (`functions/common/quota.lua`); pure."""

from collections.abc import Iterable, Mapping

from shared.model.budgets.quota import QuotaUsage
from shared.model.leases.lease import Share, bookings
from shared.model.names import DeviceUuid
from shared.model.requests.request import SharingPolicy


def charge_of(shares: Iterable[Share], memory_mib: Mapping[DeviceUuid, int]) -> QuotaUsage:
    """A device without memory in `memory_mib` is unknown."""
    cores = 0
    milli = 0
    memory = 0
    held: dict[DeviceUuid, int] = {}
    for booking in bookings(shares):
        size = memory_mib.get(booking.device, 0)
        part = 1000
        core = 1000
        if size > 0 and booking.sharing is not SharingPolicy.EXCLUSIVE:
            part = min(1000, -(-1000 * booking.memory_mib // size))
            core = 10 * booking.cores_percent or part
        cores += core
        milli += max(core, part)
        memory += booking.memory_mib
        held[booking.device] = 1
    return QuotaUsage(cores_milli=cores, milli_gpu=milli, memory_mib=memory, devices=held)
