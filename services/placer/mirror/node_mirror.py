"""Nodes and devices as the mirror holds them: mutable, and summed up for quick questions."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from shared.model.device import Device, DeviceMode, DeviceUse, Isolation
from shared.model.lease import Share
from shared.model.ledger import LedgerNode
from shared.model.names import NodeName
from shared.model.node import NodeFacts
from shared.placing.mig_instances import (
    LayoutShapes,
    format_positions,
    largest_free_mib,
    largest_instance_mib,
    layout_shapes,
    parse_positions,
)
from shared.placing.node_filters import accepts_any_pod, free_resources, has_soft_taint

if TYPE_CHECKING:
    from services.placer.mirror.tentative_reservations import Hold, Manners, Part

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
        "guarded",
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
        self.tables: LayoutShapes = layout_shapes(device.layouts) if self.mig else {}
        self.largest = largest_instance_mib(self.tables)
        """MiB of the largest instance that the device can have; 0 outside MIG mode."""
        self.healthy = device.healthy and not closed
        self.guarded = device.isolation is not Isolation.SHARED
        """Not every share may come, whatever is free."""
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
        base = self.base
        self.tags, self.alone, self.layout = base.anti_affinity_groups, base.exclusive, base.layout
        if self.mig:
            self.positions = parse_positions(base.slots_taken) if base.layout else 0
        for part in self.parts:
            if part.manners is not None:
                self._note(part.manners)
        self.shared = not (self.mig or self.layout or self.alone) and self.healthy
        """Shares that HAMi-core holds to may come, as far as manners go."""

    def _note(self, manners: "Manners") -> None:
        self.tags = self.tags.union(manners.tags)
        self.alone = self.alone or manners.alone
        self.layout = self.layout or manners.layout
        if manners.layout == self.layout:
            self.positions |= manners.positions

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
        return largest_free_mib(self.tables, self.layout, self.positions, free)

    def give_back(self, part: "Part") -> None:
        """Count a hold's part, no longer among `parts`, as taken no more."""
        if part.manners is not None:
            self.note_manners()
        self.take(-part.memory, -part.cores, -part.shares)

    def use(self) -> DeviceUse:
        """Return the sum as the model's value."""
        return DeviceUse(
            memory_mib=self.memory,
            cores_percent=self.cores,
            shares=self.shares,
            fence=self.base.fence,
            anti_affinity_groups=self.tags,
            exclusive=self.alone,
            slots_taken=format_positions(self.positions) if self.mig else self.base.slots_taken,
            layout=self.layout,
            claimed_by=self.base.claimed_by,
        )


class NodeState:
    """One node: its facts, its devices in order of index, and what is left of its resources."""

    __slots__ = (
        "devices",
        "facts",
        "free",
        "gone",
        "guarded",
        "holds",
        "linked",
        "mig",
        "name",
        "open",
        "served",
        "sets",
        "shares",
        "sharing",
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
        self.guarded = any(device.guarded for device in self.devices)
        self.sharing = tuple(
            device
            for device in self.devices
            if device.device.isolation is not Isolation.STRICT or device.mig
        )
        """Those that may be had in parts."""
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
        self.open = accepts_any_pod(node.facts)
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
