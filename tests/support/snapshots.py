"""A snapshot of one device, lease and waiting pod, for the tests of commands that show them."""

import io
from dataclasses import replace

from msgspec import structs
from rich.console import Console, RenderableType

from services.cli.snapshot.snapshot import MeasuredUsage, PodSummary, Snapshot
from shared.model.device import Device, DeviceMode, DeviceUse, MigLayout, MigProfile
from shared.model.events.pod_events import PodQueued
from shared.model.lease import Lease, LeaseState, MigPlacement, Share
from shared.model.ledger import LedgerNode, NodeTotals, WaitingPod
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.node import NodeFacts
from shared.model.placement import DeviceVerdict, NodeVerdict, Refusal
from shared.model.request import PodRequest
from shared.model.usage import ShareMeasurement

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
LEASE = Lease(
    pod=POD.pod,
    namespace=POD.namespace,
    name=POD.name,
    node=NodeName("node-0"),
    dialect="volcano-vgpu",
    state=LeaseState.ACTIVE,
    version=7,
    created_at=880.0,
    shares=(
        Share(
            container="main",
            device=GPU,
            index=2,
            device_mib=15_000,
            memory_mib=3_000,
            cores_percent=30,
            slot=1,
            fence=5,
        ),
    ),
)
NODE = NodeTotals(
    node=LedgerNode(
        facts=NodeFacts(name=NodeName("node-0")),
        devices=((DEVICE, DeviceUse(memory_mib=3_000, cores_percent=30, shares=1, fence=5)),),
    ),
    leases=(LEASE,),
)
WAITING = WaitingPod(
    queued=PodQueued(
        pod=POD.pod,
        namespace=POD.namespace,
        name=POD.name,
        resource_version="1",
        request=PodRequest(),
        created_at=900.0,
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
HELD = Snapshot(read_at=1_000.0, nodes=(NODE,))
NOT_MEASURED = MeasuredUsage()
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
