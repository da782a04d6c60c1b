"""Events about pods and nodes for the tests of the binder."""

from msgspec import structs

from shared.model.events.node_events import Allocation, DeviceReported
from shared.model.events.pod_events import (
    BoundPod,
    PodsListed,
    PodTerminated,
)
from shared.model.lease import Lease, LeaseState
from shared.model.lease_copy import dump_lease
from shared.model.names import NodeName
from tests.support.binder.world import NOW, lease


def gone(name: str = "p1", phase: str = "") -> PodTerminated:
    held = lease(name)
    return PodTerminated(
        pod=held.pod, namespace=held.namespace, name=name, node=held.node, phase=phase
    )


def in_state(state: LeaseState, name: str = "p1") -> Lease:
    return structs.replace(lease(name), state=state, version=2, created_at=NOW - 60)


def activation(held: Lease) -> Allocation:
    return Allocation(
        pod=held.pod,
        namespace=held.namespace,
        name=held.name,
        container="c",
        resource="volcano.sh/vgpu-number",
        device_ids=("GPU-n1-0-0",),
        lease=held,
    )


def report(node: str = "n1", *allocations: Allocation, at: float = NOW) -> DeviceReported:
    return DeviceReported(
        node=NodeName(node), devices=(), served=(), allocations=allocations, reported_at=at
    )


def bound(held: Lease) -> BoundPod:
    return BoundPod(
        pod=held.pod,
        namespace=held.namespace,
        name=held.name,
        node=held.node,
        lease=dump_lease(held),
    )


def listing(*pods: BoundPod, at: float = NOW, piece: int = 0, pieces: int = 1) -> PodsListed:
    return PodsListed(listing_id="l1", chunk=piece, chunks=pieces, pods=pods, listed_at=at)
