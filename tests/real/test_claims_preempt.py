"""Pods are evicted for one of higher priority with a ResourceClaim, on a real kube-scheduler."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from services.claims.clients import ClaimClient
from shared.model.clock import SystemClock, in_background
from shared.model.events.request_reply import SlicesRequest, TerminationRequest
from shared.model.leases.lease import Lease
from shared.model.leases.ledger import WaitingPod
from shared.model.names import NodeName
from shared.nats import subjects
from shared.nats.bus import Bus
from tests.real.claim_parts import API, SliceNodes
from tests.real.control_plane import Json, missing
from tests.real.leasehold import CONFIGURATION, Leasehold, Namespace
from tests.real.node_parts import GPU_MIB, GPUS, gpus_of
from tests.support.storage import HOSTNAME
from tests.support.waiting import until

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.asyncio(loop_scope="session"),
]

NODE = NodeName("a-0")
OURS = "leasehold"
ANOTHER = "default-scheduler"
"""A profile of kube-scheduler of which Leasehold serves no pods."""
ON_NODE: dict[str, Any] = {"nodeSelector": {HOSTNAME: NODE}}
AT_ONCE = (
    *("--preemption-min-runtime-s", "0", "--preemption-notice-s", "0"),
    *("--preemption-per-namespace-hour", "100"),
)
CLASS = {"metadata": {"name": "urgent"}, "value": 1000}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def claiming(up: Leasehold) -> AsyncIterator[Leasehold]:
    """One node has ResourceSlices, and its agent replies about claims."""
    await up.plane.create("/apis/scheduling.k8s.io/v1/priorityclasses", CLASS)
    nodes = SliceNodes(
        up.plane.kube,
        up.ledger,
        ClaimClient(up.plane.kube, SystemClock()),
        {NODE: gpus_of(NODE)},
    )
    flags = up.flags["planner"]
    up.flags["planner"] += AT_ONCE
    up.kill("planner")
    await up.until_ready()
    config = json.loads((up.plane.root / CONFIGURATION).read_text())
    config["profiles"].append({"schedulerName": ANOTHER})
    up.start_kube_scheduler(f"--config={up.plane.write('two-profiles.json', config)}")
    user = subjects.user_of("node-agent", NODE)
    async with Bus.connect(up.nats_url, name=user) as bus, in_background(nodes.follow_ledger()):
        await bus.reply(SlicesRequest, "agent", NODE, nodes.reply_slices)
        await bus.reply(TerminationRequest, "agent", NODE, nodes.reply_terminated)
        yield up
    up.plane.stop("kube-scheduler")
    up.flags["planner"] = flags
    up.kill("planner")
    await up.until_ready()


async def add_pod(namespace: Namespace, name: str, capacity: Json | None, **spec: Any) -> None:
    """Create a pod with a claim of its own, from a template, for so much of a GPU."""
    exactly: Json = {"deviceClassName": "gpu.leasehold.dev"}
    exactly |= {"capacity": {"requests": capacity}} if capacity else {}
    devices = {"requests": [{"name": "gpu", "exactly": exactly}]}
    template = {"metadata": {"name": name}, "spec": {"spec": {"devices": devices}}}
    path = f"{API}/namespaces/{namespace.name}/resourceclaimtemplates"
    await namespace.leasehold.plane.create(path, template)
    container = {"name": "c", "image": "pause", "resources": {"claims": [{"name": "gpu"}]}}
    await namespace.leasehold.plane.create(
        namespace.path("pods"),
        {
            "metadata": {"name": name},
            "spec": {
                "schedulerName": OURS,
                "containers": [container],
                "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": name}],
                "terminationGracePeriodSeconds": 0,
                **ON_NODE,
                **spec,
            },
        },
    )


async def leases_of(namespace: Namespace) -> list[Lease]:
    leases = (await namespace.leasehold.leases()).values()
    return [lease for lease in leases if lease.namespace == namespace.name]


async def waiting_of(namespace: Namespace) -> dict[str, WaitingPod]:
    waiting = await namespace.leasehold.ledger.waiting_pods.load()
    return {pod.queued.name: pod for pod in waiting if pod.queued.namespace == namespace.name}


@pytest.mark.parametrize(
    ("name", "capacity", "mib", "scheduler"),
    [
        ("whole", None, GPU_MIB, OURS),
        ("part", {"memory": "50Gi", "cores": "60"}, 50 * 1024, OURS),
        ("another", None, GPU_MIB, ANOTHER),
    ],
)
async def test_a_pod_with_a_claim_gets_the_gpu_of_one_that_is_evicted_for_it(
    claiming: Leasehold, name: str, capacity: Json | None, mib: int, scheduler: str
) -> None:
    others = await claiming.add_namespace(f"{name}-others")
    for number in range(GPUS):
        await others.pod(f"other-{number}", memory=0, **ON_NODE)
    await others.until_running(GPUS)
    gpu_of = {lease.name: lease.shares[0].device for lease in await leases_of(others)}
    waiting = await claiming.add_namespace(f"{name}-low")
    await add_pod(waiting, "low", capacity, schedulerName=scheduler)
    await waiting.until_waits("low", "cannot allocate all claims")
    listed = await until(
        lambda: waiting_of(waiting),
        lambda pods: any("cannot allocate" in pod.scheduler_reason for pod in pods.values()),
    )
    assert [pod.queued.scheduler for pod in listed.values()] == [
        scheduler if scheduler == ANOTHER else ""
    ]
    namespace = await claiming.add_namespace(name)

    await add_pod(namespace, "high", capacity, schedulerName=scheduler, priorityClassName="urgent")
    await namespace.until_running(1)

    [lease] = await leases_of(namespace)
    [evicted] = gpu_of.keys() - (await others.nodes()).keys()
    assert [(share.device, share.memory_mib) for share in lease.shares] == [(gpu_of[evicted], mib)]
    assert await waiting.nodes() == {}
    assert await leases_of(waiting) == []
    await until(lambda: waiting_of(namespace), lambda pods: not pods)
    for used in (waiting, namespace, others):
        await used.delete_pods()
    await until(lambda: waiting_of(waiting), lambda pods: not pods)
