"""Judges devices that are offered as replicas: none has replicas and amounts at once.

How devices are offered is what their agent advertises; what is held of them is in the ledger, and
in the containers that run. An agent that has lost its records does not know how they were offered.
"""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shared.model.devices.device import Device, DeviceMode
from shared.model.devices.replicas import Replicas
from shared.model.names import NodeName, PodUid
from tests.model.api_server import Pod
from tests.model.kubelet import KubeletRecord
from tests.model.seen import left_records, running_records
from tests.proof.observations import RawLease, RawLedger
from tests.proof.safety import HELD

if TYPE_CHECKING:
    from tests.model.world import World

STRATEGIES = {"time-slicing": "time-slicing", "mps-replicas": "mps"}
"""By the mode of a lease of replicas."""
CHANGED = "configuration has changed"
"""In a refusal: the device is offered in another way than when its share was leased."""


class ReplicaJudge:
    def __init__(self, world: "World", figures: Counter[str]) -> None:
        self.world = world
        self.figures = figures
        self._offered: dict[NodeName, Replicas | None] = {}

    def look(self, ledger: RawLedger) -> Iterator[str]:
        """Yield what is wrong at every moment."""
        self._count_changes()
        yield from self._wrong_containers()
        if ledger.ready and not self.world.lost_redis:
            for lease in ledger.leases.values():
                yield from self._wrong_lease(lease)
            yield from self._too_many(ledger)

    def note_given(self, record: KubeletRecord) -> None:
        if record.replicas is not None:
            self.figures[f"replicas given by {record.replicas.strategy}"] += 1

    def check_refused(self, node: NodeName, pod: Pod, reason: str) -> None:
        """P8: no device changes while a pod is on its way to it, unless its lease was lost."""
        is_lost = self.world.lost_redis or self.world.nodes[node].lost_records
        if CHANGED in reason and not is_lost:
            self.world.fail(f"P8: {pod.uid} fails on {node}, which has changed since: {reason}")

    def _count_changes(self) -> None:
        for name, node in self.world.nodes.items():
            for device in node.agent.known.devices:
                if device.mode is not DeviceMode.MIG:
                    if self._offered.get(name) != device.replicas:
                        what = device.replicas.strategy if device.replicas else "by amounts"
                        self.figures[f"devices offered {what}"] += 1
                    self._offered[name] = device.replicas

    def _devices(self, node: NodeName) -> dict[str, Device]:
        machine = self.world.nodes[node]
        devices = () if machine.lost_records else machine.agent.known.devices
        return {device.uuid: device for device in devices}

    def _wrong_containers(self) -> Iterator[str]:
        """Yield containers whose device is offered in another way than when they got it."""
        for node, record in (*running_records(self.world), *left_records(self.world)):
            device = self._devices(node.name).get(record.device)
            if device is not None and device.replicas != record.replicas:
                yield (
                    f"S1: {record.pod.uid} runs on {device.uuid} with {_text(record.replicas)}, "
                    f"and it is offered with {_text(device.replicas)}"
                )

    def _wrong_lease(self, lease: RawLease) -> Iterator[str]:
        """Yield shares that their device, as it is offered, does not have.

        The lease of a pod counts from its Binding on, and that of a claim once its agent has given
        it out: before that they refuse what the ledger leased while it had not read of a change.
        """
        pod = self.world.api.find(PodUid(lease.pod))
        if lease.state != "active" and not (pod is not None and pod.node and lease.state in HELD):
            return
        devices = self._devices(NodeName(lease.node))
        for share in lease.shares:
            device = devices.get(share.device)
            if device is None:
                continue
            offered = device.replicas.strategy if device.replicas else None
            if STRATEGIES.get(share.mode) != offered:
                yield (
                    f"S1: the lease of {lease.pod} on {device.uuid} is in mode {share.mode}, and "
                    f"it is offered with {_text(device.replicas)}"
                )

    def _too_many(self, ledger: RawLedger) -> Iterator[str]:
        leased = Counter(
            share.device
            for lease in ledger.leases.values()
            if lease.state in HELD
            for share in lease.shares
            if share.mode in STRATEGIES
        )
        for node in self.world.nodes:
            for uuid, device in self._devices(node).items():
                most = device.replicas.number if device.replicas else 0
                if device.replicas and leased[uuid] > most:
                    yield f"S1: {leased[uuid]} replicas of {uuid} are leased, and it has {most}"


def _text(replicas: Replicas | None) -> str:
    return f"{replicas.number} replicas by {replicas.strategy}" if replicas else "amounts"
