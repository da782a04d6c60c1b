"""Mirrored nodes and devices: mutable, with sums that make frequent checks cheap; pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, Literal

import msgspec

from shared.model.devices.device import (
    NO_USE,
    Device,
    DeviceMode,
    DeviceUse,
    Isolation,
    numa_cpus_name,
    without_claim,
)
from shared.model.devices.enforcers import NO_DEMAND, SharingMode
from shared.model.devices.node import NodeFacts
from shared.model.devices.replicas import Replicas
from shared.model.leases.lease import Lease, Share, bookings
from shared.model.leases.ledger import LedgerNode
from shared.model.names import DeviceUuid, NodeName
from shared.model.requests.request import SharingPolicy
from shared.placing.mig_instances import (
    LayoutShapes,
    format_positions,
    largest_free_mib,
    largest_instance_mib,
    layout_shapes,
    parse_positions,
)
from shared.placing.node_filters import accepts_any_pod, free_resources, has_soft_taint

EXCLUSIVE: Final = SharingPolicy.EXCLUSIVE


class SharingConstraints(msgspec.Struct, frozen=True, kw_only=True):
    exclusive: bool
    anti_affinity_groups: tuple[str, ...]
    layout: str
    """"" if it pins none."""
    positions: int
    """As bits."""


class TentativeDeviceUse:
    __slots__ = ("constraints", "cores_percent", "fence", "memory_mib", "mode", "shares")

    def __init__(
        self,
        memory_mib: int,
        cores_percent: int,
        shares: int,
        fence: int,
        constraints: SharingConstraints | None,
        *,
        mode: SharingMode,
    ) -> None:
        self.memory_mib = memory_mib
        self.cores_percent = cores_percent
        self.shares = shares
        self.fence = fence
        """The device's fence once the lease is counted; 0 until the ledger has replied."""
        self.constraints = constraints
        self.mode = mode


def tentative_uses(
    shares: Sequence[Share], groups: tuple[str, ...]
) -> Iterable[tuple[DeviceUuid, TentativeDeviceUse]]:
    if len(shares) == 1 or len({share.device for share in shares}) == len(shares):
        return [(share.device, _use_of_share(share, groups)) for share in shares]
    return _summed_uses(shares, groups)


def _use_of_share(share: Share, groups: tuple[str, ...]) -> TentativeDeviceUse:
    cores_percent = share.cores_percent
    constraints = None
    if groups or share.mig or share.sharing is EXCLUSIVE:
        cores_percent = share.booked_cores
        constraints = SharingConstraints(
            exclusive=share.sharing is EXCLUSIVE,
            anti_affinity_groups=groups,
            layout=share.mig.layout if share.mig else "",
            positions=1 << share.mig.position if share.mig else 0,
        )
    return TentativeDeviceUse(
        share.memory_mib, cores_percent, 1, share.fence, constraints, mode=share.mode
    )


def _summed_uses(
    shares: Sequence[Share], groups: tuple[str, ...]
) -> Iterable[tuple[DeviceUuid, TentativeDeviceUse]]:
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
        fence = fences[booking.device]
        yield (
            booking.device,
            TentativeDeviceUse(
                booking.memory_mib,
                booking.cores_percent,
                booking.shares,
                fence,
                constraints,
                mode=booking.mode,
            ),
        )


NEVER = -(1 << 62)
"""Before the first change of the ledger."""


class MirroredDevice:
    __slots__ = (
        "accepts_shares",
        "anti_affinity_groups",
        "device",
        "exclusive",
        "free_cores",
        "free_instance_mib",
        "free_replicas",
        "free_slot_cores",
        "free_units",
        "healthy",
        "in_mig_mode",
        "index",
        "isolation_restricted",
        "largest_instance_mib",
        "layout",
        "layout_shapes",
        "ledger_use",
        "mode",
        "node",
        "replicas",
        "shares",
        "slots",
        "taken_positions",
        "tentative_uses",
        "total_mib",
        "unit_mib",
        "used_cores",
        "used_mib",
        "uuid",
        "whole_units_mib",
    )

    def __init__(self, node: "MirroredNode", device: Device) -> None:
        self.node = node
        self.ledger_use = NO_USE
        self.tentative_uses: list[TentativeDeviceUse] = []
        self.used_mib = 0
        self.used_cores = 0
        self.shares = 0
        self.anti_affinity_groups: frozenset[str] = frozenset()
        self.exclusive = False
        self.layout = ""
        """MIG layout that live instances pin; empty if none is live."""
        self.mode: SharingMode | Literal[""] = ""
        """Of what is on it; empty if nothing is."""
        self.taken_positions = 0
        self.update_device(device)

    def update_device(self, device: Device, *, closed: bool = False) -> None:
        self.device = device
        self.uuid = device.uuid
        self.index = device.index
        self.total_mib = device.memory_mib
        self.unit_mib = device.unit_mib
        self.slots = device.slots
        self.whole_units_mib = device.memory_mib // device.unit_mib * device.unit_mib
        self.in_mig_mode = device.mode is DeviceMode.MIG
        self.replicas = device.replicas
        self.layout_shapes: LayoutShapes = layout_shapes(device.layouts) if self.in_mig_mode else {}
        self.largest_instance_mib = largest_instance_mib(self.layout_shapes)
        """MiB of the largest instance that the device can have; 0 outside MIG mode."""
        self.healthy = device.healthy and not closed
        self.isolation_restricted = self._is_restricted()
        """The device's isolation, or its mode, does not accept every share."""
        self.free_instance_mib = 0
        """MiB of the largest free MIG instance; 0: none is free."""
        self.free_replicas = 0
        """Of a device that is offered as replicas; of others 0."""
        self.update_constraints()
        self.add_use(0, 0, 0)

    def update_ledger_use(self, use: DeviceUse) -> bool:
        """Ignore an older fence; return whether the sum changed."""
        if use.fence < self.ledger_use.fence:
            return False
        use = use.taken
        before = self._sums()
        self.ledger_use = use
        if self.tentative_uses:
            self.tentative_uses = [use for use in self.tentative_uses if not self.counts(use)]
        self.sum_up()
        return before != self._sums()

    def has_pending_use(self) -> bool:
        """Return whether the ledger has not replied yet to a reservation on the device."""
        return any(use.fence == 0 for use in self.tentative_uses)

    def counts(self, use: TentativeDeviceUse) -> bool:
        return 0 < use.fence <= self.ledger_use.fence

    def _sums(self) -> tuple[object, ...]:
        sharing = self.exclusive, self.layout, self.mode, self.taken_positions
        constraints = self.anti_affinity_groups, sharing
        return self.used_mib, self.used_cores, self.shares, constraints

    def sum_up(self) -> None:
        ledger_use = self.ledger_use
        tentative = self.tentative_uses
        self.update_constraints()
        self._set_mode(ledger_use.mode or (tentative[0].mode if tentative else ""))
        self.add_use(
            ledger_use.memory_mib + sum(use.memory_mib for use in tentative) - self.used_mib,
            ledger_use.cores_percent
            + sum(use.cores_percent for use in tentative)
            - self.used_cores,
            ledger_use.shares + sum(use.shares for use in tentative) - self.shares,
        )

    def update_constraints(self) -> None:
        ledger_use = self.ledger_use
        self.anti_affinity_groups = ledger_use.anti_affinity_groups
        self.exclusive = ledger_use.exclusive
        self.layout = ledger_use.layout
        if self.in_mig_mode:
            self.taken_positions = (
                parse_positions(ledger_use.slots_taken) if ledger_use.layout else 0
            )
        for use in self.tentative_uses:
            if use.constraints is not None:
                self._add_constraints(use.constraints)
        self.accepts_shares = (
            not (self.in_mig_mode or self.replicas or self.layout or self.exclusive)
            and self.healthy
        )
        """Shares that HAMi-core enforces are not excluded by mode, exclusive use or health."""

    def _add_constraints(self, constraints: SharingConstraints) -> None:
        self.anti_affinity_groups = self.anti_affinity_groups.union(
            constraints.anti_affinity_groups
        )
        self.exclusive = self.exclusive or constraints.exclusive
        self.layout = self.layout or constraints.layout
        if constraints.layout == self.layout:
            self.taken_positions |= constraints.positions

    def _set_mode(self, mode: SharingMode | Literal[""]) -> None:
        if mode == self.mode:
            return
        self.mode = mode
        restricted = self._is_restricted()
        if restricted is not self.isolation_restricted:
            self.isolation_restricted = restricted
            self.node.restrict_isolation()

    def _is_restricted(self) -> bool:
        device = self.device
        if device.isolation is not Isolation.SHARED:
            return True
        mode = "" if self.mode in ("exclusive", "mig") else self.mode
        return device.offer.holding(NO_DEMAND, mode=mode, capped=True) is None

    def add_use(self, memory_mib: int, cores_percent: int, shares: int) -> None:
        """Negative amounts are subtracted."""
        node = self.node
        node.used_mib += memory_mib
        node.shares += shares
        self.used_mib = used_mib = self.used_mib + memory_mib
        self.used_cores += cores_percent
        self.shares += shares
        free_mib = self.total_mib - used_mib
        self.free_units = free_mib // self.unit_mib if free_mib > 0 else 0
        self.free_cores = free_cores = 100 - self.used_cores if self.accepts_shares else -1
        """Percent of the cores that another share can reserve; -1: no share is accepted."""
        self.free_slot_cores = free_cores if self.shares < self.slots else -1
        """The same for a share that takes a slot."""
        if self.in_mig_mode:
            self.free_instance_mib = self._largest_free_instance(free_mib)
        if self.replicas is not None:
            self.free_replicas = self._count_free_replicas(self.replicas, free_mib)

    def _count_free_replicas(self, replicas: Replicas, free_mib: int) -> int:
        """Return 0 also where earlier leases hold parts of another kind."""
        if not self.healthy or self.exclusive or self.layout:
            return 0
        if self.mode not in ("", replicas.mode):
            return 0
        by_memory = free_mib // max(replicas.memory_mib(self.total_mib), 1)
        free = min(self.slots - self.shares, by_memory)
        if replicas.cores_percent:
            free = min(free, (100 - self.used_cores) // replicas.cores_percent)
        return max(0, free)

    def _largest_free_instance(self, free_mib: int) -> int:
        """Return 0 also where shares from before MIG mode prevent partitioning."""
        if not self.healthy or self.exclusive or (self.shares and not self.layout):
            return 0
        return largest_free_mib(self.layout_shapes, self.layout, self.taken_positions, free_mib)

    def add_tentative_use(self, use: TentativeDeviceUse) -> None:
        self.tentative_uses.append(use)
        if not self.mode:
            self._set_mode(use.mode)
        if use.constraints is not None:
            self.update_constraints()
        self.add_use(use.memory_mib, use.cores_percent, use.shares)

    def remove_tentative_use(self, use: TentativeDeviceUse) -> None:
        if use in self.tentative_uses:
            self.tentative_uses.remove(use)
            if not (self.tentative_uses or self.ledger_use.mode):
                self._set_mode("")
            if use.constraints is not None:
                self.update_constraints()
            self.add_use(-use.memory_mib, -use.cores_percent, -use.shares)

    def use(self) -> DeviceUse:
        taken = self.taken_positions
        return DeviceUse(
            memory_mib=self.used_mib,
            cores_percent=self.used_cores,
            shares=self.shares,
            fence=self.ledger_use.fence,
            anti_affinity_groups=self.anti_affinity_groups,
            exclusive=self.exclusive,
            slots_taken=(
                format_positions(taken) if self.in_mig_mode else self.ledger_use.slots_taken
            ),
            layout=self.layout,
            mode=self.mode,
            claimed_by=self.ledger_use.claimed_by,
            claimed_until=self.ledger_use.claimed_until,
        )


class MirroredNode:
    __slots__ = (
        "accepts_any_pod",
        "aligns_numa",
        "changed_by_others",
        "changes",
        "devices",
        "facts",
        "free_resources",
        "has_divided",
        "has_soft_taint",
        "has_topology",
        "isolation_restricted",
        "linked_sets",
        "model",
        "name",
        "paused",
        "removed",
        "serving",
        "shareable_devices",
        "shares",
        "tentative_reservations",
        "total_mib",
        "used_mib",
        "used_resources",
        "version",
    )

    def __init__(self, name: NodeName) -> None:
        self.name = name
        self.changes = 0
        self.changed_by_others = NEVER
        """When others last took or freed capacity of it, as `ClusterMirror.applied_changes`."""
        self.facts = NodeFacts(name=name)
        self.version = 0
        self.used_resources: Mapping[str, int] = {}
        """Use of resources other than devices by live leases."""
        self.serving: frozenset[str] = frozenset()
        self.paused: frozenset[str] = frozenset()
        """Others that it serves, and of which its kubelet has none to allocate."""
        self.put_devices(())
        self.tentative_reservations: list[TentativeReservation] = []
        self.removed = False
        self.accepts_any_pod = True
        self.has_soft_taint = False
        self.total_mib = 0
        self.used_mib = 0
        self.shares = 0
        self.free_resources: dict[str, int] = {}
        """What is left of each resource, also of the CPUs of NUMA nodes."""

    def put_devices(self, devices: Iterable[MirroredDevice]) -> None:
        self.devices = tuple(sorted(devices, key=lambda device: device.index))
        self.has_divided = any(
            device.in_mig_mode or device.replicas is not None for device in self.devices
        )
        """Some devices are divided into MIG instances or replicas."""
        self.restrict_isolation()
        self.shareable_devices = tuple(
            device
            for device in self.devices
            if device.device.isolation is not Isolation.STRICT or device.in_mig_mode
        )
        """Devices of which a pod can get less than all."""
        self.has_topology = any(
            device.device.links or device.device.numa is not None for device in self.devices
        )
        """Links between devices or their NUMA nodes are known."""
        self.aligns_numa = any(
            device.device.one_numa or device.device.numa_cpus is not None for device in self.devices
        )
        """The kubelet's topology manager may reject pods with its devices."""
        models = {device.device.model for device in self.devices}
        self.model = models.pop() if len(models) == 1 else ""
        """The model of all devices; empty if they differ or there are none."""
        self.linked_sets: dict[object, tuple[int, tuple[int, ...]]] = {}
        """Cache of the best linked sets of devices: see `device_topology`."""

    def restrict_isolation(self) -> None:
        self.isolation_restricted = any(device.isolation_restricted for device in self.devices)

    @property
    def all_sick(self) -> bool:
        return bool(self.devices) and not any(device.healthy for device in self.devices)

    def has_same_inventory(self, node: LedgerNode) -> bool:
        """Compare objects by identity, not by value."""
        return (
            node.facts is self.facts
            and len(node.devices) == len(self.devices)
            and {id(device) for device, _ in node.devices}
            == {id(mirrored.device) for mirrored in self.devices}
            and (node.serving, node.paused) == (self.serving, self.paused)
        )

    def update_node(self, node: LedgerNode, devices: Sequence[MirroredDevice]) -> None:
        self.facts = node.facts
        self.version = node.version
        self.used_resources = node.used
        self.serving = node.serving
        self.paused = node.paused
        self.put_devices(devices)
        self.accepts_any_pod = accepts_any_pod(node.facts)
        self.has_soft_taint = has_soft_taint(node.facts)
        self.total_mib = sum(device.total_mib for device in devices)
        self.used_mib = sum(device.used_mib for device in devices)
        self.shares = sum(device.shares for device in devices)
        self.sum_up()

    def sum_up(self) -> bool:
        before = self.free_resources
        if self.tentative_reservations:
            self.tentative_reservations = [
                reservation
                for reservation in self.tentative_reservations
                if not reservation.is_counted()
            ]
        self.free_resources = free = free_resources(self.facts, self.used_resources)
        for device in self.devices if self.aligns_numa else ():
            numa = device.device.numa
            cpus = device.device.numa_cpus
            if numa is not None and cpus is not None:
                name = numa_cpus_name(numa)
                free[name] = cpus - self.used_resources.get(name, 0)
        for reservation in self.tentative_reservations:
            self.subtract_resources(reservation.resources)
        return self.free_resources != before

    def subtract_resources(self, resources: dict[str, int]) -> None:
        free = self.free_resources
        for name, amount in resources.items():
            free[name] = free.get(name, 0) - amount

    def add_resources(self, resources: dict[str, int]) -> None:
        free = self.free_resources
        for name, amount in resources.items():
            free[name] = free.get(name, 0) + amount


def idle_copy(node: MirroredNode, *, healthy: bool) -> MirroredNode:
    """No index knows the copy."""
    copy = MirroredNode(node.name)
    devices = list[MirroredDevice]()
    copy.facts = node.facts
    copy.serving = node.serving
    copy.paused = node.paused
    copy.free_resources = dict(node.facts.allocatable)
    for mirrored in node.devices:
        is_healthy = healthy or mirrored.healthy
        device = mirrored.device
        if device.healthy != is_healthy:
            device = replace(device, healthy=is_healthy)
        devices.append(MirroredDevice(copy, device))
    copy.put_devices(devices)
    return copy


def unclaimed_copy(node: MirroredNode, until: float) -> MirroredNode:
    copy = idle_copy(node, healthy=False)
    copy.free_resources = node.free_resources
    for device, copied in zip(node.devices, copy.devices, strict=True):
        use = device.use()
        copied.update_ledger_use(without_claim(use) if use.claimed_until >= until else use)
    return copy


class TentativeReservation:
    __slots__ = ("node", "resources", "uses")

    def __init__(
        self,
        node: MirroredNode,
        uses: list[tuple[MirroredDevice, TentativeDeviceUse]],
        resources: dict[str, int],
    ) -> None:
        self.node = node
        self.uses = uses
        self.resources = resources

    @classmethod
    def add(
        cls,
        node: MirroredNode,
        devices: Mapping[DeviceUuid, MirroredDevice],
        shares: Sequence[Share],
        resources: dict[str, int],
        groups: tuple[str, ...],
    ) -> "TentativeReservation":
        uses: list[tuple[MirroredDevice, TentativeDeviceUse]] = []
        for uuid, use in tentative_uses(shares, groups):
            device = devices.get(uuid)
            if device is not None:
                device.add_tentative_use(use)
                uses.append((device, use))
        reservation = cls(node, uses, resources)
        node.tentative_reservations.append(reservation)
        node.subtract_resources(resources)
        return reservation

    def confirm(self, lease: Lease) -> bool:
        """Return False, with nothing set, if the devices differ."""
        fences = {share.device: share.fence for share in lease.shares}
        if {device.uuid for device, _ in self.uses} != fences.keys():
            return False
        for device, use in self.uses:
            use.fence = fences[device.uuid]
        return True

    def is_counted(self) -> bool:
        return any(device.counts(use) for device, use in self.uses)

    def remove(self) -> None:
        for device, use in self.uses:
            device.remove_tentative_use(use)
        if self in self.node.tentative_reservations:
            self.node.tentative_reservations.remove(self)
            self.node.add_resources(self.resources)
