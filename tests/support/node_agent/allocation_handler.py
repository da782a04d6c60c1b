"""An allocation handler with a fake kubelet and fake leases."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from services.node_agent.agent_timing import AgentTiming
from services.node_agent.allocate.allocation import NodeSnapshot
from services.node_agent.allocate.handler import AllocationHandler
from services.node_agent.allocate.pod_resolver import PodResolver
from services.node_agent.allocate.reporter import AllocationReporter
from services.node_agent.gpus.inventory import devices_of
from services.node_agent.gpus.sharing_config import SharingConfig
from services.node_agent.isolation.container_files import ContainerFiles
from services.node_agent.kubelet.node_pods import NodePods
from services.node_agent.kubelet.pods import Holding, KubeletContainer, KubeletPod, PodResources
from services.node_agent.metrics import AgentMetrics, TracedAllocation
from services.node_agent.mig.instances import MigInstance
from services.node_agent.node_state import AgentNodeState
from services.node_agent.reconcile.checkpoint_reconciler import CheckpointReconciler
from services.node_agent.records.checkpoint import Checkpoint
from services.node_agent.records.known_leases import KnownLeases
from services.node_agent.records.lease_sync import LeaseSync
from services.node_agent.views.advertisement import advertisement_of
from shared.dialects import DIALECTS
from shared.dialects.dialect import ContainerSetup, Paths
from shared.model.clock import SystemClock
from shared.model.errors import UnavailableError
from shared.model.lease import Lease
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from simcluster.node_agent.gpus import SimulatedGpus, uuid_of
from tests.support.node_agent.agent import NUMBER, FakeLeaseReplies, lease_of
from tests.support.simcluster.kubelet import NODE

SLOT = f"{uuid_of(NodeName(NODE), 0)}-0"
OTHER = f"{uuid_of(NodeName(NODE), 1)}-0"


class FakeKubelet:
    """Lists pods and held devices that a test sets."""

    unreadable_reason = ""
    error = ""
    """The error of `list_holdings`; empty: none."""

    def __init__(self) -> None:
        self.pods: list[KubeletPod] = []
        self.running: frozenset[PodUid] = frozenset()
        self.held_devices: list[Holding] = []
        self.list_calls = 0

    async def list_pods(self) -> tuple[KubeletPod, ...]:
        self.list_calls += 1
        return tuple(self.pods)

    async def list_running(self) -> frozenset[PodUid]:
        return self.running

    async def list_holdings(self) -> PodResources:
        if self.error:
            raise UnavailableError(self.error)
        return PodResources(holdings=tuple(self.held_devices))

    def add(self, name: str, *containers: KubeletContainer) -> KubeletPod:
        pod = KubeletPod(
            uid=PodUid(f"uid-{name}"),
            namespace=Namespace("default"),
            name=name,
            containers=containers or (container(),),
        )
        self.pods.append(pod)
        return pod

    def add_holding(self, name: str, container: str, *ids: str) -> None:
        self.held_devices.append(Holding("default", name, container, NUMBER, frozenset(ids)))


class Effects(AgentMetrics):
    """Records calls to the disk, the views, the traces and the metrics."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def prepare(self, setup: ContainerSetup, *, starting: bool = False) -> None:
        self.calls.append("prepared for a start" if starting else "prepared")

    async def ensure_named(self, setup: ContainerSetup) -> None:
        if setup.cdi_devices:
            self.calls.append(f"specified {list(setup.cdi_devices)}")

    async def mig_instances_of(
        self, lease: Lease, container: str
    ) -> dict[tuple[DeviceUuid, int], str]:
        return {}

    def show_allocated(self, lease: Lease, containers: frozenset[str]) -> None:
        self.calls.append(f"shown {sorted(containers)}")

    def show_failed(self, lease: Lease) -> None:
        self.calls.append("shown as failed")

    def begin(self, lease: Lease, facts: Mapping[str, str]) -> TracedAllocation:
        return TracedAllocation(lease.trace, None, facts)

    def count_overcommit(self) -> None:
        self.calls.append("over-committed")

    def count_allocation(self, resource: str, outcome: str, seconds: float) -> None:
        self.calls.append(outcome)


async def no_instances() -> dict[DeviceUuid, list[MigInstance]]:
    return {}


class HandlerUnderTest:
    """An allocation handler with fake collaborators."""

    def __init__(self, path: Path) -> None:
        self.kubelet, self.effects, self.ledger = FakeKubelet(), Effects(), FakeLeaseReplies()
        node = NodeName(NODE)
        self.state = AgentNodeState()
        self.checkpoint = Checkpoint(path / "checkpoint.json", node)
        leases = KnownLeases(node)
        self.reporter = AllocationReporter(node, leases=leases, views=self.effects)
        timing = AgentTiming(resolve_s=0.15, lease_wait_s=0.15, records_retry_s=0.15)
        reconciler = CheckpointReconciler(
            self.checkpoint,
            leases,
            pods=cast(NodePods, self.kubelet),
            pod_resources=self.kubelet,
            list_mig_instances=no_instances,
            retain_refused=self.reporter.retain_refused,
            files=cast(ContainerFiles, self.effects),
            clock=SystemClock(),
        )
        resolver = PodResolver(
            LeaseSync(node, leases, self.ledger),
            pods=self.kubelet,
            pod_resources=self.kubelet,
            clock=SystemClock(),
            timing=timing,
        )
        self.handler = AllocationHandler(
            node,
            require_snapshot=self.state.require_snapshot,
            resolver=resolver,
            pod_resources=self.kubelet,
            checkpoint=self.checkpoint,
            forget_ended=reconciler.forget_ended,
            files=self.effects,
            name_cdi_devices=self.effects.ensure_named,
            mig_instances_of=self.effects.mig_instances_of,
            reporter=self.reporter,
            metrics=self.effects,
            clock=SystemClock(),
            timing=timing,
        )

    async def open(self) -> "HandlerUnderTest":
        gpus = await SimulatedGpus(NodeName(NODE), "2xT4").discover()
        devices = devices_of(gpus, SharingConfig())
        self.state.snapshot = NodeSnapshot(
            name=NodeName(NODE),
            devices={device.uuid: device for device in devices},
            served=advertisement_of(DIALECTS.values(), devices, "auto").served,
            paths=Paths(library="/l", preload="/p", containers="/c"),
        )
        return self

    def lease(self, name: str, *shares: Any, **changes: Any) -> Lease:
        return self.ledger.grant(lease_of(f"uid-{name}", *shares, name=name, **changes))


def container(name: str = "main", *, init: bool = False) -> KubeletContainer:
    return KubeletContainer(name=name, limits={NUMBER: 1}, init=init)
