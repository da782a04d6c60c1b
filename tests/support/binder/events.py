"""Events about pods and nodes for the tests of the binder."""

from services.binder.clients import NoReply
from shared.model.events.node_events import Allocation, DeviceReported
from shared.model.events.pod_events import BoundPod, ListedPods, PodsListed, PodTerminated
from shared.model.events.request_reply import BindReply
from shared.model.leases.lease import Lease, LeaseState
from shared.model.leases.lease_copy import dump_lease
from shared.model.names import NodeName
from tests.support.binder.world import NOW, FakeAgents, lease
from tests.support.build import allocation_of


def terminated(name: str = "p1", phase: str = "", rejection: str = "") -> PodTerminated:
    of = lease(name)
    return PodTerminated(
        pod=of.pod,
        namespace=of.namespace,
        name=name,
        node=of.node,
        phase=phase,
        rejection=rejection,
    )


def in_state(state: LeaseState, name: str = "p1") -> Lease:
    return lease(name, state=state, version=2, created_at=NOW - 60)


def activation(of: Lease) -> Allocation:
    return allocation_of(
        of, container="c", resource="volcano.sh/vgpu-number", device_ids=("GPU-n1-0-0",)
    )


def report(node: str = "n1", *allocations: Allocation, at: float = NOW) -> DeviceReported:
    return DeviceReported(
        node=NodeName(node), devices=(), served=(), allocations=allocations, reported_at=at
    )


def bound(of: Lease) -> BoundPod:
    return BoundPod(
        pod=of.pod,
        namespace=of.namespace,
        name=of.name,
        node=of.node,
        lease=dump_lease(of),
    )


def listing(*pods: BoundPod, request_id: str = "", piece: int = 0, pieces: int = 1) -> PodsListed:
    listed = ListedPods(bound=pods)
    ids = (request_id,) if request_id else ()
    return PodsListed(listing_id="l1", chunk=piece, chunks=pieces, pods=listed, request_ids=ids)


N1 = NodeName("n1")
N2 = NodeName("n2")


def away(*pods: str) -> BindReply:
    """The reply for pods that must wait because the agent is stopping."""
    deferred = tuple(lease(name).pod for name in pods)
    reason = "its agent is being stopped"
    return BindReply(deferred_pods=deferred, reason=reason, window_open=False, node_closed=True)


SILENT = NoReply(reason="no reply", has_responder=False)
HANGING = NoReply(reason="no reply", has_responder=True)


def no_agents() -> FakeAgents:
    """No node has an agent."""
    agents = FakeAgents()
    agents.other_reply = SILENT
    return agents
