"""Nodes and devices as the mirror holds them: mutable, and summed up for quick questions."""

from collections.abc import Iterable, Mapping, Sequence

from services.placer.instances import (
    Tables,
    largest_free,
    largest_of,
    positions_in,
    tables_of,
    taken_by,
)
from services.placer.node_filters import free_resources, has_soft_taint, is_open
from shared.model.device import Device, DeviceMode, DeviceUse
from shared.model.lease import Lease, Share, bookings
from shared.model.ledger import LedgerNode
from shared.model.names import DeviceUuid, NodeName
from shared.model.node import NodeFacts
from shared.model.request import Company

NO_USE = DeviceUse()


class DeviceState:
    """One device: what the ledger counted, the holds on top, and the sum of both."""

    __slots__ = (
        "alone",
        "base",
        "cores",
        "device",
        "everything",
        "free_units",
        "healthy",
        "index",
        "instance",
        "known_shares",
        "largest",
        "layout",
        "memory",
        "mig",
        "node",
        "parts",
        "positions",
        "room",
        "shared",
        "shares",
        "slots",
        "slotted_room",
        "tables",
        "tags",
        "total",
        "unit",
        "uuid",
    )

    def __init__(self, node: "NodeState", device: Device) -> None:
        self.node = node
        self.base = NO_USE
        self.parts: list[Part] = []
        self.memory = 0
        """MiB taken."""
        self.cores = 0
        self.shares = 0
        self.tags: frozenset[str] = frozenset()
        self.alone = False
        self.layout = ""
        """MIG layout that live instances pin; empty: none is live."""
        self.positions = 0
        """Its positions that are taken, as bits."""
        self.describe(device)

    def describe(self, device: Device, *, closed: bool = False) -> None:
        """Take over what the agent reports."""
        self.device = device
        self.uuid = device.uuid
        self.index = device.index
        self.total = device.memory_mib
        self.unit = device.unit_mib
        self.slots = device.slots
        self.everything = device.memory_mib // device.unit_mib * device.unit_mib
        self.mig = device.mode is DeviceMode.MIG
        self.tables: Tables = tables_of(device.layouts) if self.mig else {}
        self.largest = largest_of(self.tables)
        """MiB of the largest instance that the device can have; 0 outside MIG mode."""
        self.healthy = device.healthy and not closed
        self.known_shares: dict[object, Share] = {}
        self.instance = 0
        """MiB of the largest MIG instance that is free, 0 if none is."""
        self.note_manners()
        self.take(0, 0, 0)

    def learn(self, use: DeviceUse) -> bool:
        """Take over the ledger's totals and tell whether the sum changed.

        An older fence is an older truth and is passed over.
        """
        if use.fence < self.base.fence:
            return False
        before = self._summed()
        self.base = use
        if self.parts:
            self.parts = [part for part in self.parts if not part.is_counted()]
        self.sum_up()
        return before != self._summed()

    def _summed(self) -> tuple[object, ...]:
        manners = (self.tags, self.alone, self.layout, self.positions)
        return (self.memory, self.cores, self.shares, manners)

    def sum_up(self) -> None:
        """Add the holds to the ledger's totals."""
        use, parts = self.base, self.parts
        self.note_manners()
        self.take(
            use.memory_mib + sum(part.memory for part in parts) - self.memory,
            use.cores_percent + sum(part.cores for part in parts) - self.cores,
            use.shares + sum(part.shares for part in parts) - self.shares,
        )

    def note_manners(self) -> None:
        """Work out who is on the device, whether he keeps it to himself, and in which instances."""
        base, parts = self.base, self.parts
        tags = {tag for part in parts for tag in part.tags}
        self.tags = base.tags | tags if tags else base.tags
        self.alone = base.alone or any(part.alone for part in parts)
        self.layout = base.layout or next((part.layout for part in parts if part.layout), "")
        if self.mig:
            self.positions = positions_in(base.taken) if base.layout else 0
            for part in parts:
                if part.layout == self.layout:
                    self.positions |= part.positions
        self.shared = not (self.mig or self.layout or self.alone) and self.healthy
        """Shares that HAMi-core holds to may come, as far as manners go."""

    def take(self, memory: int, cores: int, shares: int) -> None:
        """Count so much more as taken."""
        self.node.taken += memory
        self.node.shares += shares
        self.memory += memory
        self.cores += cores
        self.shares += shares
        free = self.total - self.memory
        self.free_units = free // self.unit if free > 0 else 0
        self.room = room = 100 - self.cores if self.shared else -1
        """Percent of the cores that another share may reserve; -1: none may come."""
        self.slotted_room = room if self.shares < self.slots else -1
        """The same for a share that takes a slot."""
        if self.mig:
            self.instance = self._largest_free(free)

    def _largest_free(self, free: int) -> int:
        """Shares from before it was partitioned keep a device from being partitioned at all."""
        if not self.healthy or self.alone or (self.shares and not self.layout):
            return 0
        return largest_free(self.tables, self.layout, self.positions, free)

    def give_back(self, part: "Part") -> None:
        """Count a hold's part, no longer among `parts`, as taken no more."""
        if part.has_manners:
            self.note_manners()
        self.take(-part.memory, -part.cores, -part.shares)

    def use(self) -> DeviceUse:
        """Return the sum as the model's value."""
        return DeviceUse(
            memory_mib=self.memory,
            cores_percent=self.cores,
            shares=self.shares,
            fence=self.base.fence,
            tags=self.tags,
            alone=self.alone,
            taken=taken_by(self.positions) if self.mig else self.base.taken,
            layout=self.layout,
        )


class NodeState:
    """One node: its facts, its devices in order of index, and what is left of its resources."""

    __slots__ = (
        "devices",
        "facts",
        "free",
        "gone",
        "holds",
        "linked",
        "mig",
        "name",
        "open",
        "served",
        "sets",
        "shares",
        "soft",
        "taken",
        "total",
        "used",
        "version",
    )

    def __init__(self, name: NodeName) -> None:
        self.name = name
        self.facts = NodeFacts(name=name)
        self.version = 0
        self.used: Mapping[str, int] = {}
        self.served: frozenset[str] = frozenset()
        self.put_devices(())
        self.holds: list[Hold] = []
        self.gone = False
        self.open = True
        self.soft = False
        self.total = 0
        """MiB of all its devices."""
        self.taken = 0
        """MiB taken of all its devices."""
        self.shares = 0
        """Shares on all its devices."""
        self.free: dict[str, int] = {}

    def put_devices(self, devices: Iterable[DeviceState]) -> None:
        """Take over which devices there are."""
        self.devices = tuple(sorted(devices, key=lambda device: device.index))
        self.mig = any(device.mig for device in self.devices)
        """Some are in MIG mode."""
        self.linked = any(
            device.device.links or device.device.numa is not None for device in self.devices
        )
        """It is known how they lie to each other."""
        self.sets: dict[object, tuple[int, tuple[int, ...]]] = {}
        """Which sets of them are linked best, as far as it was asked: see `topology`."""

    def describe(self, node: LedgerNode, devices: Sequence[DeviceState]) -> None:
        """Take over everything the ledger says of the node."""
        self.facts = node.facts
        self.version = node.version
        self.used = node.used
        self.served = node.serving
        self.put_devices(devices)
        self.open = is_open(node.facts)
        self.soft = has_soft_taint(node.facts)
        self.total = sum(device.total for device in devices)
        self.taken = sum(device.memory for device in devices)
        self.shares = sum(device.shares for device in devices)
        self.sum_up()

    def sum_up(self) -> bool:
        """Work out afresh what is left of each resource; tell whether it changed."""
        before = self.free
        if self.holds:
            self.holds = [hold for hold in self.holds if not hold.is_counted()]
        self.free = free_resources(self.facts, self.used)
        for hold in self.holds:
            self.take(hold.resources)
        return self.free != before

    def take(self, resources: Mapping[str, int]) -> None:
        """Subtract what a hold takes."""
        free = self.free
        for name, amount in resources.items():
            free[name] = free.get(name, 0) - amount

    def give_back(self, resources: Mapping[str, int]) -> None:
        """Add what a hold took."""
        free = self.free
        for name, amount in resources.items():
            free[name] = free.get(name, 0) + amount


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
    if len({share.device for share in shares}) == len(shares):
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
