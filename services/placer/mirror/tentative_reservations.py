"""Holds: what this placer has chosen, on top of the totals, until the ledger's contain it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.placer.mirror.node_mirror import DeviceState, NodeState
from shared.model.lease import Lease, Share, bookings
from shared.model.names import DeviceUuid
from shared.model.request import SharingPolicy


@dataclass(frozen=True, slots=True)
class Manners:
    """What a hold says of a device besides amounts; most say nothing."""

    alone: bool
    tags: tuple[str, ...]
    layout: str
    """MIG layout that it pins; empty: none."""
    positions: int
    """Of that layout, as bits."""


class Part:
    """What a hold takes of one device."""

    __slots__ = ("cores", "device", "fence", "manners", "memory", "shares")

    def __init__(
        self,
        device: DeviceState,
        memory: int,
        cores: int,
        shares: int,
        *,
        fence: int,
        manners: Manners | None,
    ) -> None:
        self.device = device
        self.memory = memory
        self.cores = cores
        self.shares = shares
        self.fence = fence
        """The device's fence once the lease counts; 0 while the ledger has not answered."""
        self.manners = manners

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
            if part.manners is not None:
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
                cores, manners = share.cores_percent, None
                if tags or share.mig or share.sharing is SharingPolicy.EXCLUSIVE:
                    cores = share.booked_cores
                    layout = share.mig.layout if share.mig else ""
                    manners = _manners(share.device, share.sharing, layout, shares, tags)
                yield Part(device, share.memory_mib, cores, 1, fence=share.fence, manners=manners)
        return
    fences = {share.device: share.fence for share in shares}
    for booking in bookings(shares):
        device = devices.get(booking.device)
        if device is not None:
            manners = _manners(booking.device, booking.sharing, booking.layout, shares, tags)
            yield Part(
                device,
                booking.memory_mib,
                booking.cores_percent,
                booking.shares,
                fence=fences[booking.device],
                manners=manners,
            )


def _manners(
    device: DeviceUuid,
    company: SharingPolicy,
    layout: str,
    shares: Sequence[Share],
    tags: tuple[str, ...],
) -> Manners:
    positions = 0
    for share in shares:
        if share.mig and share.device == device:
            positions |= 1 << share.mig.position
    return Manners(company is SharingPolicy.EXCLUSIVE, tags, layout, positions)
