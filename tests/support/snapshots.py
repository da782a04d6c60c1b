"""One device, lease and waiting pod, as the API returns them, for tests of what shows them."""

import io
from collections.abc import Iterable
from dataclasses import replace

from msgspec import structs
from rich.console import Console, RenderableType

from services.api.projection.projection import Projection
from services.api.projection.visible_cluster import VisibleCluster
from services.cli.inspect.explanation import Explanation, explanation_of
from services.cli.pod_summary import PodSummary
from shared.model.devices.device import Device, DeviceMode, DeviceUse, MigLayout, MigProfile
from shared.model.devices.node import NodeFacts
from shared.model.leases.lease import LeaseState, MigPlacement, ShareMeasurement
from shared.model.leases.ledger import LedgerNode, NodeTotals, WaitingPod
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.requests.placement import DeviceVerdict, NodeVerdict, Refusal
from shared.model.requests.request import PodRequest
from shared.model.views.pods import TraceView
from tests.support.api.board import seen, usage
from tests.support.build import lease, pod_queued, share

OURS = frozenset({"volcano", "leasehold"})
GPU = DeviceUuid("GPU-0")
DEVICE = Device(uuid=GPU, index=2, model="Tesla T4", memory_mib=15_000, slots=4)
POD = PodSummary(
    pod=PodUid("6f1e0f5a-8d0e-4a55-b3a0-0f6f5f0a7c11"),
    namespace=Namespace("team"),
    name="first",
    phase="Pending",
    scheduler="volcano",
)
LEASE = lease(
    POD.pod,
    "node-0",
    share(GPU, 2, device_mib=15_000, memory_mib=3_000, cores_percent=30, slot=1, fence=5),
    namespace=POD.namespace,
    name=POD.name,
    dialect="volcano-vgpu",
    state=LeaseState.ACTIVE,
    version=7,
    created_at=880.0,
)
NODE = NodeTotals(
    node=LedgerNode(
        facts=NodeFacts(name=NodeName("node-0")),
        devices=((DEVICE, DeviceUse(memory_mib=3_000, cores_percent=30, shares=1, fence=5)),),
    ),
    leases=(LEASE,),
)
WAITING = WaitingPod(
    queued=pod_queued(
        POD.pod, PodRequest(), namespace=POD.namespace, name=POD.name, created_at=900.0
    ),
    refusal=Refusal(
        reason="0/1 nodes are available: 1 Insufficient GPU memory.",
        counts=(("InsufficientGpuMemory", 1),),
        nearest_nodes=(
            NodeVerdict(
                node=NodeName("node-0"),
                reason="Insufficient GPU memory",
                devices=(
                    DeviceVerdict(device=GPU, index=2, reason="9 MiB are requested, 4 are free"),
                ),
            ),
        ),
        hint="ask for at most 4 MiB",
    ),
    capacity=1,
)
MEASURED = ShareMeasurement(
    pod=POD.pod,
    namespace=POD.namespace,
    name=POD.name,
    container="main",
    device=GPU,
    memory_mib=1_200,
    cores_percent=0,
    processes=2,
    idle_since=400.0,
)


def cluster_of(
    *nodes: NodeTotals,
    waiting: Iterable[WaitingPod] = (),
    measured: Iterable[ShareMeasurement] | None = (),
    now: float = 1_000.0,
    idle_after_s: float = 600.0,
) -> VisibleCluster:
    """Return what a viewer of everything sees; without `measured`, agents do not reply."""
    board = Projection()
    board.update_nodes([], nodes)
    board.update_waiting(waiting)
    for node in nodes:
        reply = None if measured is None else usage(*measured)
        board.update_measured(node.node.facts.name, reply, now=now, idle_after_s=idle_after_s)
    return seen(board, now=now, idle_after_s=idle_after_s)


def explained(
    pod: PodSummary, cluster: VisibleCluster, schedulers: frozenset[str] = OURS
) -> Explanation:
    return explanation_of(pod, cluster.pod(pod.pod, TraceView(trace="")), schedulers)


HELD = cluster_of(NODE)
EMPTY = cluster_of()


def drawn(renderable: RenderableType, width: int = 120) -> str:
    text = io.StringIO()
    Console(file=text, width=width, highlight=False).print(renderable)
    return text.getvalue()


def with_an_instance() -> NodeTotals:
    profiles = (
        MigProfile(name="2g.10gb", memory_mib=10_240, count=3),
        MigProfile(name="1g.5gb", memory_mib=5_120, count=1),
    )
    device = replace(
        DEVICE,
        memory_mib=40_960,
        mode=DeviceMode.MIG,
        layouts=(MigLayout(name="group2", profiles=profiles),),
    )
    place = MigPlacement(layout="group2", position=1, profile="2g.10gb")
    held = structs.replace(LEASE.shares[0], memory_mib=10_240, cores_percent=0, mig=place)
    use = DeviceUse(memory_mib=10_240, shares=1, fence=5, layout="group2", slots_taken="0100")
    return NodeTotals(
        node=LedgerNode(facts=NODE.node.facts, devices=((device, use),)),
        leases=(structs.replace(LEASE, shares=(held,)),),
    )
