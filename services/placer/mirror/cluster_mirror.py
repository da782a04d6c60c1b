"""The placer's picture of the cluster: nodes, devices and what is taken of them.

The ledger's totals are absolute, so that hearing a change twice is harmless. On top of them lie
holds: choices of this placer that the totals may not contain yet. A hold whose device has reached
the fence of its lease is part of the totals and is dropped.
"""

from collections.abc import Iterable, Mapping

from services.placer.mirror.node_mirror import DeviceState, NodeState
from services.placer.mirror.tentative_reservations import Hold
from shared.model.device import DeviceUse
from shared.model.lease import Lease
from shared.model.ledger import LedgerNode
from shared.model.names import DeviceUuid, NodeName, PodUid
from shared.model.placement import Placement

LOG_LIMIT = 1 << 16
"""Changes kept for indexes to catch up with; who is further behind starts anew."""


class ChangeLog:
    """Which nodes changed, in order; readers remember how far they came."""

    def __init__(self) -> None:
        self._entries: list[NodeState] = []
        self._forgotten = 0

    @property
    def end(self) -> int:
        """The position after the last change."""
        return self._forgotten + len(self._entries)

    def add(self, node: NodeState) -> None:
        """Note a change."""
        self._entries.append(node)
        if len(self._entries) > LOG_LIMIT:
            del self._entries[: LOG_LIMIT // 2]
            self._forgotten += LOG_LIMIT // 2

    def since(self, position: int) -> list[NodeState] | None:
        """Return the changes from `position` on, or None if they are no longer known."""
        if position < self._forgotten:
            return None
        return self._entries[position - self._forgotten :]


class Mirror:
    """All nodes by name, and logs of which of them changed, for the indexes to follow."""

    def __init__(self) -> None:
        self.nodes: dict[NodeName, NodeState] = {}
        self.changes = ChangeLog()
        self.inventory_changes = ChangeLog()
        """Changes of more than what is taken: facts, devices, services."""
        self.soft_nodes = 0
        """Nodes with a taint that only says what should rather not happen."""
        self.mig_nodes = 0
        """Nodes with devices in MIG mode."""
        self._devices: dict[DeviceUuid, DeviceState] = {}
        self._holds: dict[PodUid, Hold] = {}

    def reset(self, nodes: Iterable[LedgerNode]) -> None:
        """Forget everything, holds included, and start from a snapshot."""
        for pod in list(self._holds):
            self.drop(pod)
        kept = list(nodes)
        for name in self.nodes.keys() - {node.facts.name for node in kept}:
            self.remove_node(name)
        for device in self._devices.values():
            device.base = DeviceUse()
        for node in kept:
            self.put_node(node)

    def largest(self) -> tuple[int, int]:
        """Return the most MiB, and the most of its node's units, that any one device has."""
        devices = self._devices.values()
        mib = max((state.total for state in devices), default=0)
        return mib, max((state.total // state.unit for state in devices), default=0)

    def put_node(self, node: LedgerNode) -> None:
        """Learn a whole node: facts, devices, totals."""
        name = node.facts.name
        state = self.nodes.get(name)
        if state is None:
            state = self.nodes[name] = NodeState(name)
        self.soft_nodes -= state.soft
        self.mig_nodes -= state.mig
        before = {device.uuid: device for device in state.devices}
        devices = []
        for device, use in node.devices:
            known = before.pop(device.uuid, None) or DeviceState(state, device)
            known.describe(device, closed=device.index in node.facts.excluded_devices)
            known.learn(use)
            self._devices[device.uuid] = known
            devices.append(known)
        self._forget_devices(before.values())
        state.describe(node, devices)
        self.soft_nodes += state.soft
        self.mig_nodes += state.mig
        self.changes.add(state)
        self.inventory_changes.add(state)

    def remove_node(self, name: NodeName) -> None:
        """Forget a node and its devices."""
        state = self.nodes.pop(name, None)
        if state is None:
            return
        state.gone = True
        self.soft_nodes -= state.soft
        self.mig_nodes -= state.mig
        self._forget_devices(state.devices)
        self.changes.add(state)
        self.inventory_changes.add(state)

    def learn_use(self, uuid: DeviceUuid, use: DeviceUse) -> None:
        """Learn a device's totals; an unknown device comes with its node later.

        Totals that only confirm what was held here already change nothing that indexes see.
        """
        device = self._devices.get(uuid)
        if device is not None and device.learn(use):
            self.changes.add(device.node)

    def learn_used(self, name: NodeName, used: Mapping[str, int], version: int) -> None:
        """Learn what leases take of a node's resources; an older version is passed over."""
        node = self.nodes.get(name)
        if node is not None and version >= node.version:
            node.used, node.version = used, version
            if node.sum_up():
                self.changes.add(node)

    def hold(
        self,
        pod: PodUid,
        placement: Placement,
        resources: Mapping[str, int],
        tags: tuple[str, ...] = (),
    ) -> None:
        """Count a choice as taken until the ledger has spoken of it."""
        node = self.nodes.get(placement.node)
        if pod in self._holds:
            self.drop(pod)
        if node is not None:
            self._holds[pod] = Hold.of(node, self._devices, placement.shares, resources, tags)
            self.changes.add(node)

    def drop(self, pod: PodUid) -> None:
        """Take back a hold: the ledger granted nothing, or its totals contain it already."""
        hold = self._holds.pop(pod, None)
        if hold is not None:
            hold.end()
            self.changes.add(hold.node)

    def settle(self, lease: Lease) -> None:
        """Replace a hold by the lease it became, until the totals have reached its fences."""
        hold, node = self._holds.get(lease.pod), self.nodes.get(lease.node)
        confirmed = hold is not None and hold.node is node and hold.confirm(lease)
        if hold is not None and confirmed and lease.shares:
            if hold.is_counted():
                self.drop(lease.pod)
            return
        self.drop(lease.pod)
        if node is None or not lease.shares:
            return
        hold = Hold.of(
            node, self._devices, lease.shares, lease.resources, lease.anti_affinity_groups
        )
        if hold.is_counted():
            hold.end()
        else:
            self._holds[lease.pod] = hold
        self.changes.add(node)

    def forget_counted(self) -> None:
        """Forget the holds that the totals contain by now."""
        for pod in [pod for pod, hold in self._holds.items() if hold.is_counted()]:
            del self._holds[pod]

    def _forget_devices(self, devices: Iterable[DeviceState]) -> None:
        for device in devices:
            if self._devices.get(device.uuid) is device:
                del self._devices[device.uuid]
