"""The placer's mirror of nodes, devices and what is used of them; pure.

The ledger's totals are absolute, so repeated changes do no harm. On top, choices of this placer
count tentatively until a device's totals reach the fence of the lease.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from shared.model.devices.device import DeviceUse
from shared.model.leases.lease import Lease
from shared.model.leases.ledger import LedgerChange, LedgerNode, NodeUse
from shared.model.names import DeviceUuid, NodeName, PodUid
from shared.model.requests.placement import Placement
from shared.placing.mirror.node_mirror import MirroredDevice, MirroredNode, TentativeReservation

CHANGE_LOG_LENGTH: Final = 1 << 16
"""An index that is further behind is rebuilt."""


class ChangeLog:
    def __init__(self) -> None:
        self._nodes: list[MirroredNode] = []
        self._trimmed = 0

    @property
    def end(self) -> int:
        return self._trimmed + len(self._nodes)

    def add(self, node: MirroredNode) -> None:
        node.changes += 1
        self._nodes.append(node)
        if len(self._nodes) > CHANGE_LOG_LENGTH:
            del self._nodes[: CHANGE_LOG_LENGTH // 2]
            self._trimmed += CHANGE_LOG_LENGTH // 2

    def since(self, position: int) -> list[MirroredNode] | None:
        if position < self._trimmed:
            return None
        return self._nodes[position - self._trimmed :]


class ChangeReader:
    def __init__(self, log: ChangeLog) -> None:
        self._log = log
        self._position = -1

    def read(self) -> Sequence[MirroredNode] | None:
        """Return None if any node may have changed."""
        position = self._position
        end = self._log.end
        if position == end:
            return ()
        self._position = end
        return self._log.since(position)


class ClusterMirror:
    def __init__(self) -> None:
        self.nodes: dict[NodeName, MirroredNode] = {}
        self.changes = ChangeLog()
        self.inventory_changes = ChangeLog()
        """Changes of more than amounts in use: facts, devices, served resources."""
        self.capacity = -1
        self.version = 0
        self.applied_changes = 0
        self.soft_taint_nodes = 0
        self.restricted_nodes = 0
        self.divided_nodes = 0
        """Nodes with devices that are divided into MIG instances or replicas."""
        self.claimed: dict[DeviceUuid, MirroredDevice] = {}
        """Devices that leases may use up to the time until which they are claimed."""
        self._devices: dict[DeviceUuid, MirroredDevice] = {}
        self._largest = (0, 0)
        self._largest_as_of = 0
        """The end of `inventory_changes` when the largest device was determined."""
        self._reservations: dict[PodUid, TentativeReservation] = {}

    def reset(self, nodes: Iterable[LedgerNode]) -> None:
        """Tentative reservations are dropped, too."""
        for pod in list(self._reservations):
            self.drop(pod)
        snapshot = list(nodes)
        for name in self.nodes.keys() - {node.facts.name for node in snapshot}:
            self.remove_node(name)
        for device in self._devices.values():
            device.ledger_use = DeviceUse()
        for node in snapshot:
            self.put_node(node)

    def apply(self, changes: Iterable[LedgerChange]) -> None:
        """Of repeated totals, only the last are applied."""
        devices: dict[DeviceUuid, DeviceUse] = {}
        used: dict[NodeName, NodeUse] = {}
        for change in changes:
            if change.nodes or change.removed:
                self.update_uses(devices, used)
                devices = {}
                used = {}
            for node in change.nodes:
                self.put_node(node)
            for name in change.removed:
                self.remove_node(name)
            devices |= change.devices
            used |= change.used
            self.capacity = change.capacity
            self.version = change.version
            self.applied_changes += 1
        self.update_uses(devices, used)

    def update_uses(
        self, devices: Mapping[DeviceUuid, DeviceUse], nodes: Mapping[NodeName, NodeUse]
    ) -> None:
        for uuid, use in devices.items():
            self.update_device_use(uuid, use)
        for name, node_use in nodes.items():
            self.update_node_use(name, node_use.used, node_use.version)

    def largest_device(self) -> tuple[int, int]:
        """Return the largest size in MiB and in units."""
        if self._largest_as_of != self.inventory_changes.end:
            devices = self._devices.values()
            mib = max((device.total_mib for device in devices), default=0)
            units = max((device.total_mib // device.unit_mib for device in devices), default=0)
            self._largest = (mib, units)
            self._largest_as_of = self.inventory_changes.end
        return self._largest

    def put_node(self, node: LedgerNode) -> None:
        name = node.facts.name
        mirrored = self.nodes.get(name)
        if mirrored is None:
            mirrored = self.nodes[name] = MirroredNode(name)
        elif mirrored.has_same_inventory(node):
            mirrored.version = node.version
            uses = {d.uuid: use for d, use in node.devices}
            self.update_uses(uses, {name: NodeUse(version=node.version, used=node.used)})
            return
        self._count_facts(mirrored, -1)
        before = {device.uuid: device for device in mirrored.devices}
        devices = []
        for device, use in node.devices:
            mirrored_device = before.pop(device.uuid, None) or MirroredDevice(mirrored, device)
            mirrored_device.update_device(
                device, closed=device.index in node.facts.excluded_devices
            )
            mirrored_device.update_ledger_use(use)
            self._note_claim(mirrored_device)
            self._devices[device.uuid] = mirrored_device
            devices.append(mirrored_device)
        self._remove_devices(before.values())
        mirrored.update_node(node, devices)
        self._count_facts(mirrored, 1)
        self.changes.add(mirrored)
        self.inventory_changes.add(mirrored)

    def remove_node(self, name: NodeName) -> None:
        node = self.nodes.pop(name, None)
        if node is None:
            return
        node.removed = True
        self._count_facts(node, -1)
        self._remove_devices(node.devices)
        self.changes.add(node)
        self.inventory_changes.add(node)

    def update_device_use(self, uuid: DeviceUuid, use: DeviceUse) -> None:
        """An unknown device comes with its node later.

        Totals that only confirm a tentative reservation change nothing that indexes see.
        """
        device = self._devices.get(uuid)
        if device is None:
            return
        has_changed = device.update_ledger_use(use)
        if self.claimed or use.claimed_until:
            self._note_claim(device)
        if has_changed:
            if not device.has_pending_use():
                device.node.changed_by_others = self.applied_changes
            self.changes.add(device.node)

    def update_node_use(self, name: NodeName, used: Mapping[str, int], version: int) -> None:
        """Ignore an older version."""
        node = self.nodes.get(name)
        if node is not None and version >= node.version:
            node.used_resources = used
            node.version = version
            if node.sum_up():
                self.changes.add(node)

    def reserve(
        self,
        pod: PodUid,
        placement: Placement,
        resources: dict[str, int],
        groups: tuple[str, ...] = (),
    ) -> None:
        """Count a choice as used until the totals contain it, or it is dropped."""
        node = self.nodes.get(placement.node)
        if pod in self._reservations:
            self.drop(pod)
        if node is not None:
            if placement.numa_cpus:
                resources = resources | placement.numa_cpus
            self._reservations[pod] = TentativeReservation.add(
                node, self._devices, placement.shares, resources, groups
            )
            self.changes.add(node)

    def drop(self, pod: PodUid) -> None:
        """Remove a reservation that was not granted or that the totals contain."""
        reservation = self._reservations.pop(pod, None)
        if reservation is not None:
            reservation.remove()
            self.changes.add(reservation.node)

    def is_tentative(self, pod: PodUid) -> bool:
        """Return whether a choice for the pod counts that the totals may not contain yet."""
        return pod in self._reservations

    def confirm(self, lease: Lease) -> None:
        reservation = self._reservations.get(lease.pod)
        node = self.nodes.get(lease.node)
        confirmed = (
            reservation is not None and reservation.node is node and reservation.confirm(lease)
        )
        if reservation is not None and confirmed and lease.shares:
            if reservation.is_counted():
                self.drop(lease.pod)
            return
        self.drop(lease.pod)
        if node is None or not lease.shares:
            return
        reservation = TentativeReservation.add(
            node, self._devices, lease.shares, lease.resources, lease.anti_affinity_groups
        )
        if reservation.is_counted():
            reservation.remove()
        else:
            self._reservations[lease.pod] = reservation
        self.changes.add(node)

    def note_contention(self, name: NodeName) -> None:
        node = self.nodes.get(name)
        if node is not None:
            node.changed_by_others = self.applied_changes

    def drop_counted(self) -> None:
        counted = [
            pod for pod, reservation in self._reservations.items() if reservation.is_counted()
        ]
        for pod in counted:
            del self._reservations[pod]

    def _count_facts(self, node: MirroredNode, sign: int) -> None:
        self.soft_taint_nodes += sign * node.has_soft_taint
        self.restricted_nodes += sign * (not node.accepts_any_pod)
        self.divided_nodes += sign * node.has_divided

    def _remove_devices(self, devices: Iterable[MirroredDevice]) -> None:
        for device in devices:
            if self._devices.get(device.uuid) is device:
                del self._devices[device.uuid]
                self.claimed.pop(device.uuid, None)

    def _note_claim(self, device: MirroredDevice) -> None:
        if device.ledger_use.claimed_until:
            self.claimed[device.uuid] = device
        else:
            self.claimed.pop(device.uuid, None)
