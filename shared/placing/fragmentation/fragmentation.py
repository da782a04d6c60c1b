"""The cost of a placement: idle GPU that typical pods can use before it and not after; pure."""

from bisect import insort
from collections.abc import Sequence

from shared.model.device import required_cores_percent
from shared.model.request import PodRequest, SharingPolicy
from shared.placing.choice.picks import DevicePick
from shared.placing.fragmentation.usable_gpu import WHOLE, UsableGpu
from shared.placing.fragmentation.workload import Workload
from shared.placing.mirror.cluster_mirror import ClusterMirror
from shared.placing.mirror.node_mirror import MirroredDevice, MirroredNode


class NodeValue:
    """A node's free amounts, and what typical pods can use of them."""

    __slots__ = ("cpu", "free", "memory", "parts", "usable", "value")

    def __init__(self, node: MirroredNode, usable: UsableGpu) -> None:
        self.cpu = node.free_resources.get("cpu", 0)
        self.memory = node.free_resources.get("memory", 0)
        self.free = {device: free_part(device) for device in node.devices}
        self.parts = tuple(sorted(self.free.values()))
        self.usable = usable
        self.value = usable.value(self.cpu, self.memory, self.parts)


class Fragmentation:
    """Compares placements by the learned workload. Values of nodes are kept until they change."""

    def __init__(self, mirror: ClusterMirror) -> None:
        self.mirror = mirror
        self.workload = Workload()
        self._version = 0
        self._usable: dict[tuple[int, int, str], UsableGpu] = {}
        self._nodes: dict[MirroredNode, NodeValue] = {}
        self._seen_changes = -1

    def cost(self, request: PodRequest, node: MirroredNode, picks: Sequence[DevicePick]) -> float:
        """Return the thousandths of a GPU that typical pods can use before and not after.

        What the pod itself uses counts, too: it is the same on all nodes.
        """
        if not node.devices or not self.workload.typical:
            return 0.0
        before = self._nodes.get(node) or self._value_of(node)
        free, parts = before.free.copy(), list(before.parts)
        for container, device, memory_mib, _ in picks:
            part = -(-WHOLE * memory_mib // (device.total_mib or 1))
            part = max(part, 10 * required_cores_percent(container))
            alone = container.sharing is SharingPolicy.EXCLUSIVE
            parts.remove(free[device])
            free[device] = 0 if alone or part > free[device] else free[device] - part
            insort(parts, free[device])
        resources = request.resources
        after = before.usable.value(
            before.cpu - resources.get("cpu", 0),
            before.memory - resources.get("memory", 0),
            tuple(parts),
        )
        return before.value - after

    def catch_up(self) -> None:
        """Apply changes of the mirror and of the workload since the last call."""
        if self._version != self.workload.version:
            self._version = self.workload.version
            self._usable.clear()
            self._nodes.clear()
        changes = self.mirror.changes
        changed = changes.since(self._seen_changes) if self._seen_changes >= 0 else None
        if changed is None:
            self._nodes.clear()
        else:
            for node in changed:
                self._nodes.pop(node, None)
        self._seen_changes = changes.end

    def _value_of(self, node: MirroredNode) -> NodeValue:
        device = node.devices[0].device
        key = (device.memory_mib, device.unit_mib, device.model)
        usable = self._usable.get(key)
        if usable is None:
            usable = self._usable[key] = UsableGpu(self.workload.typical, device)
        value = self._nodes[node] = NodeValue(node, usable)
        return value


def free_part(device: MirroredDevice) -> int:
    """Return the thousandths of a device that another share could get."""
    if device.in_mig_mode:
        return WHOLE * device.free_instance_mib // max(device.total_mib, 1)
    if device.free_slot_cores <= 0:
        return 0
    return max(
        0,
        min(
            WHOLE * device.free_units * device.unit_mib // device.total_mib,
            10 * device.free_slot_cores,
        ),
    )
