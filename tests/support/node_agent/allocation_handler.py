"""An allocation handler with a fake kubelet and fake leases."""

from pathlib import Path
from typing import Any

from services.node_agent.agent_timing import AgentTiming
from services.node_agent.allocate.grants import Grants
from services.node_agent.allocate.handler import AllocationHandler
from services.node_agent.gpus.inventory import SharingConfig, devices_of
from services.node_agent.kubelet.pods import Holding, KubeletContainer, KubeletPod
from services.node_agent.metrics import AgentMetrics
from services.node_agent.mig.instances import MigInstance
from services.node_agent.reconcile.checkpoint_reconciler import CheckpointReconciler
from services.node_agent.records.checkpoint import Checkpoint
from services.node_agent.records.known_leases import KnownLeases
from services.node_agent.records.lease_sync import LeaseSync
from shared.dialects.dialect import ContainerSetup
from shared.model.events.node_events import ShareRefused
from shared.model.leases.lease import Lease
from shared.model.names import DeviceUuid, NodeName
from shared.runtime.telemetry import Tracing
from simcluster.node_agent.gpus import SimulatedGpus, uuid_of
from tests.support.clock import FastClock
from tests.support.node_agent.agent import NUMBER, FakeLeaseReplies, lease_of
from tests.support.node_agent.node import FakeKubelet, kubelet_pod, node_of, snapshot_of
from tests.support.simcluster.kubelet import NODE

SIGHT_S = 60.0
"""2.4 s of the machine's clock: a loaded one may stop a test for a second."""
SLOT = f"{uuid_of(NodeName(NODE), 0)}::0"
OTHER = f"{uuid_of(NodeName(NODE), 1)}::0"


class Effects(AgentMetrics):
    """Records calls to the disk, the views, the traces and the metrics; there is no MIG."""

    unwritable_reason = ""

    def __init__(self) -> None:
        super().__init__(Tracing("node-agent", None))
        self.calls: list[str] = []
        self.failures: dict[str, Exception] = {}
        """By the name of a method, what it raises."""

    def _fail(self, method: str) -> None:
        if method in self.failures:
            raise self.failures[method]

    async def prepare(
        self, setup: ContainerSetup, *, starting: bool = False, new: bool = False
    ) -> None:
        self._fail("prepare")
        self.calls.append("prepared for a start" if starting else "prepared")

    async def ensure_named(self, setup: ContainerSetup) -> None:
        self._fail("ensure_named")
        if setup.cdi_devices:
            self.calls.append(f"specified {list(setup.cdi_devices)}")

    async def instance_uuids(
        self, lease: Lease, container: str
    ) -> dict[tuple[DeviceUuid, int], str]:
        self._fail("instance_uuids")
        return {
            (share.device, share.mig.position): f"MIG-{share.mig.position}"
            for share in lease.shares_of(container)
            if share.mig is not None
        }

    async def list_instances(self) -> dict[DeviceUuid, list[MigInstance]]:
        return {}

    def show_allocated(self, lease: Lease, containers: frozenset[str]) -> None:
        self.calls.append(f"shown {sorted(containers)}")

    def show_failed(self, lease: Lease) -> None:
        self.calls.append("shown as failed")

    def count_overcommit(self) -> None:
        self.calls.append("over-committed")

    def count_allocation(self, resource: str, outcome: str, seconds: float) -> None:
        self.calls.append(outcome)


class HandlerWorld:
    """An allocation handler with fake collaborators."""

    def __init__(self, path: Path) -> None:
        self.kubelet = FakeKubelet()
        self.effects = Effects()
        self.ledger = FakeLeaseReplies()
        kubelet: Any = self.kubelet
        effects: Any = self.effects
        bus: Any = self.ledger
        self.node = node_of(
            kubelet,
            checkpoint=Checkpoint(path / "checkpoint.json", NODE),
            lease_sync=LeaseSync(KnownLeases(NodeName(NODE)), bus),
            files=effects,
            cdi=effects,
            metrics=effects,
            clock=FastClock(25),
            timing=AgentTiming(sight_s=SIGHT_S),
        )
        self.checkpoint = self.node.checkpoint
        self.grants = Grants(self.node, effects, CheckpointReconciler(self.node, kubelet, effects))
        self.handler = AllocationHandler(self.node, kubelet, self.grants, effects)

    async def open(self) -> "HandlerWorld":
        gpus = await SimulatedGpus(NodeName(NODE), "2xT4").discover()
        self.node.snapshot = snapshot_of(*devices_of(gpus, SharingConfig()))
        return self

    async def allocate(self, *ids: str) -> ContainerSetup:
        """Call Allocate, by default for the first slot of the first GPU."""
        return await self.handler.allocate(NUMBER, ids or (SLOT,))

    async def refusal(self) -> ShareRefused:
        """Return the one event that was published."""
        (event,) = await self.node.outbox.take()
        assert isinstance(event, ShareRefused)
        return event

    @property
    def allocated(self) -> list[str]:
        """Pods that were given something."""
        return [allocation.pod for allocation in self.node.checkpoint.allocations]

    def lease(self, name: str, *shares: Any, **changes: Any) -> Lease:
        return self.ledger.grant(lease_of(f"uid-{name}", *shares, name=name, **changes))

    def add(self, name: str, *containers: KubeletContainer) -> KubeletPod:
        pod = kubelet_pod(name, containers=containers or (container(),))
        self.kubelet.pods.append(pod)
        return pod

    def add_leased(self, name: str, *shares: Any) -> KubeletPod:
        """Add a pod that waits for what its lease gives it."""
        self.lease(name, *shares)
        return self.add(name)

    def add_holding(self, name: str, container: str, *ids: str) -> None:
        holding = Holding("default", name, container, NUMBER, frozenset(ids))
        self.kubelet.holdings.append(holding)


def container(name: str = "main", *, init: bool = False) -> KubeletContainer:
    return KubeletContainer(name=name, limits={NUMBER: 1}, init=init)
