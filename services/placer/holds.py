"""Holds: what this placer has chosen, on top of the totals, until the ledger's contain it."""

from collections.abc import Iterable, Mapping, Sequence

from services.placer.mirrored import DeviceState, NodeState
from shared.model.lease import Lease, Share, bookings
from shared.model.names import DeviceUuid
from shared.model.request import Company


class Part:
    """What a hold takes of one device."""

    __slots__ = (
        "alone",
        "cores",
        "device",
        "fence",
        "has_manners",
        "layout",
        "memory",
        "positions",
        "shares",
        "tags",
    )

    def __init__(
        self,
        device: DeviceState,
        memory: int,
        cores: int,
        shares: int,
        *,
        alone: bool,
        tags: tuple[str, ...],
        fence: int,
        layout: str = "",
        positions: int = 0,
    ) -> None:
        self.device = device
        self.memory = memory
        self.cores = cores
        self.shares = shares
        self.alone = alone
        self.tags = tags
        self.layout = layout
        self.positions = positions
        self.has_manners = bool(tags or alone or layout)
        """It says more of the device than amounts."""
        self.fence = fence
        """The device's fence once the lease counts; 0 while the ledger has not answered."""

    def is_counted(self) -> bool:
        """Say whether the device's totals contain it."""
        return 0 < self.fence <= self.device.base.fence


class Hold:
    """What one chosen placement takes, until the ledger's totals contain it."""

    __slots__ = ("node", "parts", "resources")

    def __init__(self, node: NodeState, parts: list[Part], resources: Mapping[str, int]) -> None:
        self.node = node
        self.parts = parts
        self.resources = resources

    @classmethod
    def of(
        cls,
        node: NodeState,
        devices: Mapping[DeviceUuid, DeviceState],
        shares: Sequence[Share],
        resources: Mapping[str, int],
        tags: tuple[str, ...],
    ) -> "Hold":
        """Make a hold for `shares` and lay it on the node and its devices."""
        hold = cls(node, list(_parts(devices, shares, tags)), resources)
        for part in hold.parts:
            device = part.device
            device.parts.append(part)
            if part.has_manners:
                device.note_manners()
            device.take(part.memory, part.cores, part.shares)
        node.holds.append(hold)
        node.take(resources)
        return hold

    def confirm(self, lease: Lease) -> bool:
        """Note the fences of the lease; False, and nothing noted, if it is not what was held."""
        fences = {share.device: share.fence for share in lease.shares}
        if {part.device.uuid for part in self.parts} != fences.keys():
            return False
        for part in self.parts:
            part.fence = fences[part.device.uuid]
        return True

    def is_counted(self) -> bool:
        """Say whether the totals contain it: all of a lease reaches them in one change."""
        return any(part.is_counted() for part in self.parts)

    def end(self) -> None:
        """Take the hold away again."""
        for part in self.parts:
            if part in part.device.parts:
                part.device.parts.remove(part)
                part.device.give_back(part)
        if self in self.node.holds:
            self.node.holds.remove(self)
            self.node.give_back(self.resources)


def _parts(
    devices: Mapping[DeviceUuid, DeviceState], shares: Sequence[Share], tags: tuple[str, ...]
) -> Iterable[Part]:
    if len(shares) == 1 or len({share.device for share in shares}) == len(shares):
        for share in shares:
            device = devices.get(share.device)
            if device is not None:
                yield Part(
                    device,
                    share.memory_mib,
                    share.booked_cores,
                    1,
                    alone=share.company is Company.ALONE,
                    tags=tags,
                    fence=share.fence,
                    layout=share.mig.layout if share.mig else "",
                    positions=1 << share.mig.position if share.mig else 0,
                )
        return
    fences = {share.device: share.fence for share in shares}
    for booking in bookings(shares):
        device = devices.get(booking.device)
        if device is not None:
            yield Part(
                device,
                booking.memory_mib,
                booking.cores_percent,
                booking.shares,
                alone=booking.company is Company.ALONE,
                tags=tags,
                fence=fences[booking.device],
                layout=booking.layout,
                positions=_positions(booking.device, shares),
            )


def _positions(device: DeviceUuid, shares: Sequence[Share]) -> int:
    positions = 0
    for share in shares:
        if share.mig and share.device == device:
            positions |= 1 << share.mig.position
    return positions
