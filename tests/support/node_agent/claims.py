"""ResourceClaims with an allocation on the test's node, and their leases."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from services.node_agent.service import NodeAgent
from shared.kubelet_api.dra import api_pb2 as dra
from shared.model.events.node_events import LeaseHolder
from shared.model.leases.lease import ClaimAllocation, Lease, Share
from shared.model.names import NodeName, PodUid
from shared.model.requests.claim import DRIVER, DraMode, device_name, generation_of
from simcluster.apimachinery.objects import Json
from simcluster.kubelet.settings import NodeSettings
from simcluster.node_agent.gpus import uuid_of
from tests.support.node_agent.agent import OneNodeCluster, lease_of, one_node_cluster, share
from tests.support.simcluster.kubelet import FAST, NODE
from tests.support.waiting import until

ALLOCATED_AT = "2026-11-23T02:42:03Z"


FAST_CLAIMS = replace(FAST, claim_retry_s=0.2)
RATE = 40.0
"""Of the agent's clock: a claim waits 1 s for its lease."""


@asynccontextmanager
async def cluster_with_claims(
    gpus: str = "2xT4", *, kubelet: NodeSettings = FAST_CLAIMS, rate: float = RATE, **changes: Any
) -> AsyncIterator[OneNodeCluster]:
    """Start a cluster whose agent serves claims."""
    async with one_node_cluster(
        gpus, settings=kubelet, rate=rate, dra=DraMode.CONDITIONS, **changes
    ) as cluster:
        cluster.changes["cdi_dir"] = cluster.node.kubelet.files.cdi
        yield cluster


async def registered(cluster: OneNodeCluster) -> None:
    """Wait until the kubelet has registered the driver, and the slices are written."""

    def is_ready() -> bool:
        assert cluster.agent is not None
        return cluster.agent.probes["dra"]() is None

    await until(is_ready)


@asynccontextmanager
async def serving_claims(
    gpus: str = "2xT4", **changes: Any
) -> AsyncIterator[tuple[OneNodeCluster, NodeAgent]]:
    """Run an agent that the kubelet has registered, whose slices are written."""
    async with cluster_with_claims(gpus, **changes) as cluster, cluster.running() as agent:
        await registered(cluster)
        yield cluster, agent


async def prepare(agent: NodeAgent, lease: Lease, uid: str = "") -> Sequence[dra.Device]:
    """Prepare the claim of a lease, as the kubelet does; another uid is of a later claim."""
    assert agent.claims is not None
    pod = PodUid(uid) if uid else lease.pod
    claim = LeaseHolder(pod=pod, namespace=lease.namespace, name=lease.name, claim=True)
    return await agent.claims.preparation.prepare(claim)


def pod_and_claim(cluster: OneNodeCluster, *results: Json) -> tuple[Json, Json]:
    """Create the claim `shares`, and the pod `one` that uses it."""
    pod = cluster.node.create(pod_with_claim("one", "shares"))
    return pod, create_claim(cluster, "shares", *(results or (result(),)), pods=(pod,))


def result(index: int = 0, *, request: str = "gpu", **more: Any) -> Json:
    """Return an allocation result for the node's GPU with this index."""
    return {
        "request": request,
        "driver": DRIVER,
        "pool": NODE,
        "device": device_name(uuid_of(NodeName(NODE), index)),
        "shareID": f"share-{request}-{index}",
        **more,
    }


def instance_result(profile: str) -> Json:
    """Return an allocation result for a MIG instance of the node's first GPU."""
    return result(device=device_name(uuid_of(NodeName(NODE), 0), profile))


def create_claim(
    cluster: OneNodeCluster, name: str, *results: Json, pods: tuple[Json, ...] = ()
) -> Json:
    """Create a claim with these results, reserved for pods."""
    store = cluster.api.store
    requests = [
        {"name": result["request"], "exactly": {"deviceClassName": "gpu"}} for result in results
    ]
    metadata = {"name": name, "namespace": "default"}
    spec = {"devices": {"requests": requests}}
    store.create("resourceclaims", {"metadata": metadata, "spec": spec})
    allocation = {"devices": {"results": list(results)}, "allocationTimestamp": ALLOCATED_AT}
    reserved = [
        {"resource": "pods", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
        for pod in pods
    ]
    status = {"status": {"allocation": allocation, "reservedFor": reserved}}
    return store.patch("resourceclaims", "default", name, status, subresource="status")


def pod_with_claim(name: str, claim: str, **spec: Any) -> Json:
    """Return a pod on the node whose container uses a claim."""
    main = {"name": "main", "image": "app", "resources": {"claims": [{"name": "gpu"}]}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "nodeName": NODE,
            "containers": [main],
            "resourceClaims": [{"name": "gpu", "resourceClaimName": claim}],
            "terminationGracePeriodSeconds": 0,
            **spec,
        },
    }


def claim_lease(stored: Json, /, *shares: Share, **changes: Any) -> Lease:
    """Return the lease of a claim's allocation, with one share for each of its results."""
    results = stored["status"]["allocation"]["devices"]["results"]
    keys = [(result["request"], result["device"], result.get("shareID", "")) for result in results]
    meta = stored["metadata"]
    allocation = ClaimAllocation(generation=generation_of(ALLOCATED_AT, keys))
    own = shares or tuple(
        share(container=result["request"], share_id=result.get("shareID", ""), slot=number)
        for number, result in enumerate(results)
    )
    facts = {"name": meta["name"], "dialect": "", "claim": allocation, **changes}
    return lease_of(meta["uid"], *own, **facts)


def slices_of(cluster: OneNodeCluster) -> list[Json]:
    """Return the stored ResourceSlices."""
    return cluster.api.store.list("resourceslices")
