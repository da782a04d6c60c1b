"""A placement's use of each device until the ledger's totals contain it; pure."""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from shared.model.lease import Share, bookings
from shared.model.names import DeviceUuid
from shared.model.request import SharingPolicy

EXCLUSIVE: Final = SharingPolicy.EXCLUSIVE


class SharingConstraints(msgspec.Struct, frozen=True, kw_only=True):
    """Constraints of a use besides amounts; most uses have none."""

    exclusive: bool
    anti_affinity_groups: tuple[str, ...]
    layout: str
    """MIG layout that it pins; empty: none."""
    positions: int
    """Taken positions of that layout, as bits."""


class TentativeDeviceUse:
    """A tentative reservation's use of one device."""

    __slots__ = ("constraints", "cores_percent", "fence", "memory_mib", "shares")

    def __init__(
        self,
        memory_mib: int,
        cores_percent: int,
        shares: int,
        *,
        fence: int,
        constraints: SharingConstraints | None,
    ) -> None:
        self.memory_mib = memory_mib
        self.cores_percent = cores_percent
        self.shares = shares
        self.fence = fence
        """The device's fence once the lease is counted; 0 until the ledger has replied."""
        self.constraints = constraints


def tentative_uses(
    shares: Sequence[Share], groups: tuple[str, ...]
) -> Iterable[tuple[DeviceUuid, TentativeDeviceUse]]:
    """Return what the shares of a pod with these anti-affinity groups take, device by device."""
    if len(shares) == 1 or len({share.device for share in shares}) == len(shares):
        return [(share.device, _use_of_share(share, groups)) for share in shares]
    return _summed_uses(shares, groups)


def _use_of_share(share: Share, groups: tuple[str, ...]) -> TentativeDeviceUse:
    """Return the use of a device by one share, the only one of its pod there."""
    cores_percent, constraints = share.cores_percent, None
    if groups or share.mig or share.sharing is EXCLUSIVE:
        cores_percent = share.booked_cores
        constraints = SharingConstraints(
            exclusive=share.sharing is EXCLUSIVE,
            anti_affinity_groups=groups,
            layout=share.mig.layout if share.mig else "",
            positions=1 << share.mig.position if share.mig else 0,
        )
    return TentativeDeviceUse(
        share.memory_mib, cores_percent, 1, fence=share.fence, constraints=constraints
    )


def _summed_uses(
    shares: Sequence[Share], groups: tuple[str, ...]
) -> Iterable[tuple[DeviceUuid, TentativeDeviceUse]]:
    """Sum up shares of several containers on the same devices."""
    fences = {share.device: share.fence for share in shares}
    for booking in bookings(shares):
        positions = 0
        for share in shares:
            if share.mig and share.device == booking.device:
                positions |= 1 << share.mig.position
        constraints = SharingConstraints(
            exclusive=booking.sharing is EXCLUSIVE,
            anti_affinity_groups=groups,
            layout=booking.layout,
            positions=positions,
        )
        yield (
            booking.device,
            TentativeDeviceUse(
                booking.memory_mib,
                booking.cores_percent,
                booking.shares,
                fence=fences[booking.device],
                constraints=constraints,
            ),
        )
