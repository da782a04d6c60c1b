"""The wire form of every event, pinned: what version 1 wrote must always be readable.

After adding a field with a default: `python -m tests.contract.test_wire`; review the difference.
"""

import json
from pathlib import Path
from typing import Any

import msgpack
import pytest

from shared.model.device import Device, DeviceMode
from shared.model.errors import RequestError
from shared.model.events.claim_events import (
    AllocatedClaim,
    AllocatedDevice,
    ClaimAllocated,
    ClaimDeallocated,
)
from shared.model.events.event import Event
from shared.model.events.node_events import (
    Allocation,
    DeviceReported,
    HealthChanged,
    LeaseHolder,
    ShareActivated,
    ShareRefused,
    ViolationFound,
)
from shared.model.events.pod_events import (
    BindingFailed,
    BoundPod,
    BudgetChanged,
    Heartbeat,
    LargestDeviceReported,
    LeaseChanged,
    LeaseResized,
    LedgerRebuilt,
    ListedPods,
    NodeChanged,
    NodesListed,
    PlacementChosen,
    PlacementRefused,
    PodBound,
    PodFilteredOut,
    PodGated,
    PodQueued,
    PodRejected,
    PodsListed,
    PodTerminated,
    QuotasUpdated,
    ResyncRequested,
)
from shared.model.events.request_reply import (
    BindReply,
    BindRequest,
    ClaimLeaseReply,
    ClaimLeaseRequest,
    GrantReply,
    GrantRequest,
    LeasesReply,
    LeasesRequest,
    LimitsReply,
    LimitsRequest,
    PodBindingReply,
    PodBindingRequest,
    ResizeReply,
    ResizeRequest,
    SlicesReply,
    SlicesRequest,
    TerminationReply,
    TerminationRequest,
    UsageReply,
    UsageRequest,
)
from shared.model.lease import ClaimAllocation, Lease, LeaseState, Share, ShareSize
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.node import NodeFacts, NodeRevision, Taint
from shared.model.placement import DeviceVerdict, NodeVerdict, Placement, Refusal
from shared.model.quota import Quota, QuotaExcess, QuotaLimits
from shared.model.request import (
    DeviceOrder,
    DeviceSelection,
    GpuRequest,
    NodeOrder,
    NodeRequirements,
    NodeTerm,
    PodRequest,
    Toleration,
)
from shared.model.usage import ShareMeasurement
from shared.nats import wire

PINNED = Path(__file__).with_name("wire_v1.json")
POD = PodUid("7f7c2c5e-57a5-4d3c-9d0e-0d7e6c1f2a3b")
NS = Namespace("default")
NODE = NodeName("gpu-a")
WHO: dict[str, Any] = {"pod": POD, "namespace": NS, "name": "train"}
TRACE = "00-7f7c2c5e57a54d3c9d0e0d7e6c1f2a3b-00f067aa0ba902b7-01"
SIZE = ShareSize(memory_mib=2000, cores_percent=40)
LEASE = Lease(
    **WHO,
    node=NODE,
    shares=(
        Share(
            container="cuda",
            device=DeviceUuid("GPU-a"),
            index=1,
            device_mib=16000,
            device_model="Tesla T4",
            memory_mib=3000,
            cores_percent=50,
            slot=3,
            fence=17,
            requested_size=SIZE,
            share_id="9cbf540b-0a33-4f1c-9723-f543a2dd5a0b",
        ),
    ),
    claim=ClaimAllocation(generation="2031-05-01T10:00:00Z gpu/gpu-a/9cbf", consumers=(POD,)),
    dialect="volcano-vgpu",
    resources={"cpu": 500, "pods": 1},
    anti_affinity_groups=("default/g",),
    trace=TRACE,
    state=LeaseState.BOUND,
    resized_at=1_787_000_000.125,
    version=2,
    created_at=1787000000.5,
    expires_at=0.0,
)
REQUEST = PodRequest(
    dialect="volcano-vgpu",
    containers=(GpuRequest(container="cuda", gpus=2, memory_units=3000, cores_percent=50),),
    triggers=("volcano.sh/vgpu-number",),
    selection=DeviceSelection(types=("A100",), uuids=("GPU-a",), mode="hami-core"),
    anti_affinity_groups=("default/g",),
    device_order=DeviceOrder.SPREAD,
    node_order=NodeOrder.SPREAD,
    resources={"cpu": 500, "memory": 1 << 30, "pods": 1},
    node_requirements=NodeRequirements(
        selector=(("zone", "a"),),
        required=((NodeTerm(key="k", operator="In", values=("v",)),),),
        preferred=((5, (NodeTerm(key="k", operator="Exists"),)),),
        tolerations=(Toleration(key="t", operator="Exists"),),
        unsupported=("spec.resourceClaims[0]",),
    ),
    priority=7,
)
REFUSAL = Refusal(
    reason="0/1 nodes are available: 1 Insufficient GPU memory.",
    counts=(("InsufficientGpuMemory", 1),),
    nearest_nodes=(
        NodeVerdict(
            node=NODE,
            reason="no device fits",
            devices=(DeviceVerdict(device=DeviceUuid("GPU-a"), index=0, reason="full"),),
        ),
    ),
    hint="request less",
)
ACTIVATION = Allocation(
    **WHO,
    container="cuda",
    resource="volcano.sh/vgpu-number",
    device_ids=("GPU-a-3",),
    lease=LEASE,
    activated_at=1787000001.0,
)
DEVICE = Device(
    uuid=DeviceUuid("GPU-a"),
    index=0,
    model="Tesla T4",
    memory_mib=15360,
    slots=10,
    mode=DeviceMode.MIG,
    healthy=False,
    numa=1,
)
FACTS = NodeFacts(
    name=NODE,
    labels={"zone": "a"},
    taints=(Taint(key="k", effect="NoSchedule", value="v"),),
    unschedulable=True,
    allocatable={"cpu": 4000},
    used_by_others={"cpu": 100, "pods": 1},
    excluded_devices=(3,),
    unserved_resources=("volcano.sh/gpu-memory",),
)
QUEUED = PodQueued(**WHO, resource_version="5", request=REQUEST, by_kube_scheduler=True)
HOLDER = LeaseHolder(pod=POD, namespace=NS, name="train", claim=True)
BOUND = BoundPod(pod=POD, namespace=NS, name="train", node=NODE, lease="{}")

CLAIM = AllocatedClaim(
    claim=PodUid("u3"),
    namespace=NS,
    name="gpu",
    node=NODE,
    generation="2031-05-01T10:00:00Z gpu/gpu-a/9cbf",
    devices=(
        AllocatedDevice(
            request="gpu", device="gpu-a", share_id="9cbf", memory_mib=3000, cores_percent=50
        ),
    ),
    consumers=(POD,),
    resource_version="5",
    answer="leasehold.dev/Leased",
    lease="{}",
)

SAMPLES: tuple[Event, ...] = (
    PodQueued(
        **WHO, resource_version="5", request=REQUEST, trace=TRACE, created_at=1.5, requeue_number=4
    ),
    PodRejected(**WHO, resource_version="5", reason="cores 101", trace=TRACE),
    PodGated(**WHO, resource_version="5", priority=7, created_at=1.5, requeue_number=4),
    PodTerminated(**WHO, node=NODE, phase="Failed", rejection="OutOfcpu: none", trace=TRACE),
    NodesListed(nodes=(NODE,), revision=5),
    NodeChanged(node=FACTS, deleted=True, revision=NodeRevision(5, 7)),
    PodsListed(
        listing_id="l1",
        chunk=0,
        chunks=1,
        pods=ListedPods(bound=(BOUND,), unbound=(PodUid("u2"),), claims=(CLAIM,)),
        request_ids=("t1",),
    ),
    ClaimAllocated(claim=CLAIM, trace=TRACE),
    ClaimDeallocated(
        claim=CLAIM.claim,
        namespace=NS,
        name="gpu",
        node=NODE,
        generation=CLAIM.generation,
        trace=TRACE,
    ),
    PlacementChosen(lease=LEASE, trace=TRACE),
    PlacementRefused(**WHO, refusal=REFUSAL, trace=TRACE),
    PodBound(lease=LEASE, latency_s=0.25, trace=TRACE),
    BindingFailed(**WHO, reason="gone", trace=TRACE),
    LeaseChanged(lease=LEASE),
    DeviceReported(
        node=NODE,
        devices=(DEVICE,),
        served=("volcano.sh/vgpu-number",),
        newly_served=("volcano.sh/vgpu-number",),
        allocations=(ACTIVATION,),
        reported_at=3.5,
        pods_unreadable=True,
        other_plugin=True,
        fences={DEVICE.uuid: 12},
    ),
    ShareActivated(node=NODE, allocation=ACTIVATION, trace=TRACE),
    ShareRefused(node=NODE, reason="no lease", pod=POD, namespace=NS, name="t", container="c"),
    QuotasUpdated(
        quotas=(
            Quota(
                namespace=NS,
                limits=QuotaLimits(milli_gpu=2500, memory_mib=40_000, cards=3),
                models=(("T4", QuotaLimits(cores_milli=1000)),),
                only_models=True,
                model_label="gpu-model",
                pools=("public",),
                pool_label="gpu-pool",
            ),
        ),
        read_at=1787000001.5,
    ),
    LargestDeviceReported(memory_mib=81_920, memory_units=8_192),
    ViolationFound(
        node=NODE,
        pod=POD,
        namespace=NS,
        name="train",
        container="cuda",
        reason="GpuIsolationLost",
        message="container cuda has no region file any more",
        found_at=4.5,
    ),
    HealthChanged(
        node=NODE,
        device=DEVICE.uuid,
        index=0,
        healthy=False,
        fault="XidError: Xid 79, the GPU has fallen off the bus",
        holders=(HOLDER,),
        changed_at=4.75,
    ),
    LedgerRebuilt(generation="e2"),
    ResyncRequested(reason="a test", request_id="t1"),
    PodFilteredOut(queued=QUEUED, refusal=REFUSAL, capacity=7),
    PodBindingRequest(queued=QUEUED, placement=Placement(node=NODE, shares=LEASE.shares)),
    PodBindingReply(node=NODE, lease=LEASE, quotas=(QuotaExcess(measure="cards"),)),
    LeasesRequest(node=NODE, pods=(POD,), claim=HOLDER),
    LeasesReply(leases=(LEASE,)),
    TerminationRequest(node=NODE, pod=POD),
    TerminationReply(terminated=True),
    BindRequest(node=NODE, leases=(LEASE,)),
    BindReply(deferred_pods=(POD,), reason="it restarts", window_open=False, node_closed=True),
    ClaimLeaseRequest(claim=CLAIM, trace=TRACE),
    ClaimLeaseReply(devices=('{"driver":"gpu.leasehold.dev"}',), refusal="no"),
    SlicesRequest(node=NODE),
    SlicesReply(written=False, reason="the API server dropped allowMultipleAllocations"),
    LimitsRequest(node=NODE, lease=LEASE, resize_id="8f3a", finished=True),
    LimitsReply(applied=False, reason="much", container="c", kept=SIZE, in_use_mib=3_000),
    UsageRequest(node=NODE),
    UsageReply(
        measured_at=4.5,
        shares=(
            ShareMeasurement(
                pod=POD,
                namespace=NS,
                name="train",
                container="main",
                device=DeviceUuid("GPU-a"),
                memory_mib=1_200,
                cores_percent=35,
                processes=2,
                idle_since=3.5,
            ),
        ),
    ),
    ResizeRequest(pod=POD, container="main", memory_mib=6_144, cores_percent=30),
    GrantRequest(
        namespace=Namespace("team-a"), minutes="120", actor="me", reason="deadline", key="one"
    ),
    GrantReply(refusal="why not", granted="120.000", remaining="130.500"),
    ResizeReply(
        outcome="resized",
        reason="why not",
        hint="what then",
        container="main",
        node=NODE,
        devices=(0,),
        before=ShareSize(memory_mib=4_096, cores_percent=20),
        after=ShareSize(memory_mib=6_144, cores_percent=30),
        pending=("the pod's annotations",),
        notes=("cores: later",),
    ),
    LeaseResized(
        lease=LEASE,
        container="main",
        before=ShareSize(memory_mib=4_096, cores_percent=20),
        after=ShareSize(memory_mib=6_144, cores_percent=30),
    ),
    BudgetChanged(
        namespace=NS,
        state="exhausted",
        previous_state="warning",
        lease_class="reclaimable",
        warned_percent=95,
        weight=2,
        state_since=5.5,
        reported_at=6.5,
        window="2031-05",
        used_units=72_000_000_000,
        remaining_units=0,
        current_rate_milli_gpu=1500,
        exhausted_at=6.5,
    ),
    Heartbeat(
        service="node-agent",
        instance="agent-gpu-a",
        node=NODE,
        interval_s=7.5,
        stopping=True,
        unready_reasons=("nats: not connected",),
    ),
)


def written() -> dict[str, Any]:
    return {sample.subject: msgpack.unpackb(wire.encode([sample])) for sample in SAMPLES}


def pinned() -> dict[str, Any]:
    forms: dict[str, Any] = json.loads(PINNED.read_text())
    return forms


def test_every_event_is_pinned() -> None:
    ours = (kind for kind in Event.__subclasses__() if kind.__module__.startswith("shared."))
    kinds = {kind.subject for kind in ours}

    assert kinds == {sample.subject for sample in SAMPLES} == set(pinned())


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.subject)
def test_events_are_written_in_the_pinned_form(sample: Event) -> None:
    assert written()[sample.subject] == pinned()[sample.subject]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.subject)
def test_the_pinned_form_is_read_and_unknown_fields_are_ignored(sample: Event) -> None:
    form = pinned()[sample.subject]
    form["events"][0]["a_field_of_tomorrow"] = 1

    assert wire.decode(msgpack.packb(form), type(sample)) == [sample]


@pytest.mark.parametrize("data", [b"", b"\xc1", msgpack.packb({"v": 2}), msgpack.packb([1])])
def test_malformed_messages_are_refused(data: bytes) -> None:
    with pytest.raises(RequestError):
        wire.decode(data, PodTerminated)


def test_of_a_message_with_an_invalid_event_the_others_are_read() -> None:
    gone = PodTerminated(**WHO, node=NODE, phase="Failed")
    too_long = PodTerminated(**{**WHO, "name": "x" * 254}, node=NODE, phase="Failed")

    events, errors = wire.decode_each(wire.encode([gone, too_long, gone]), PodTerminated)

    assert events == [gone, gone]
    assert [str(error).rpartition(": ")[2] for error in errors] == [
        "Expected `str` of length <= 253 - at `$.name`"
    ]


if __name__ == "__main__":
    PINNED.write_text(json.dumps(written(), indent=1, sort_keys=True) + "\n")
