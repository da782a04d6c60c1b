"""Builders for the page's tests: nodes, leases, waiting pods, budgets."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from services.api.projection.problems import AffectedObject, DataAge
from services.api.projection.projection import Projection
from services.api.projection.visible_cluster import VisibleCluster, all_namespaces
from shared.model.devices.device import Device, Hardware
from shared.model.events.pod_events import BudgetChanged
from shared.model.events.request_reply import UsageReply
from shared.model.leases.lease import Lease, LeaseState, ShareMeasurement
from shared.model.leases.ledger import NodeTotals, WaitingPod, counted_use
from shared.model.leases.preemption import EvictionOutcome, EvictionRecord, PreemptionCause
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.placement import Refusal
from shared.model.views.gpus import DeviceView
from tests.support import build


def node_totals(
    *leases: Lease, name: str = "n1", devices: int | Sequence[Device] = 2, **fields: Any
) -> NodeTotals:
    """Return a node with the totals of its leases."""
    uses, _ = counted_use(leases)
    built = build.devices(devices, name) if isinstance(devices, int) else devices
    device_uses = [
        (device, uses[device.uuid]) if device.uuid in uses else device for device in built
    ]
    return NodeTotals(node=build.ledger_node(name, *device_uses, **fields), leases=leases)


def lease(pod: str = "p1", gpu: int = 0, **fields: Any) -> Lease:
    node = fields.pop("node", "n1")
    share = build.share(f"GPU-{node}-{gpu}", gpu, slot=fields.pop("slot", 0), fence=1)
    return build.lease(pod, node, share, state=fields.pop("state", LeaseState.BOUND), **fields)


def waiting(pod: str, *, namespace: str = "a", priority: int = 0, since: float = 5.0) -> WaitingPod:
    wanted = build.request(build.gpu(), priority=priority)
    return WaitingPod(
        queued=build.pod_queued(pod, wanted, namespace=namespace),
        refusal=Refusal(reason="0/2 nodes", hint="try less"),
        capacity=1,
        waiting_since=since,
    )


def projected(*accounts: NodeTotals) -> Projection:
    made = Projection()
    made.update_nodes([], accounts)
    return made


def seen(
    board: Projection,
    visible: Callable[[Namespace], bool] = all_namespaces,
    *,
    now: float = 2_000.0,
    missing: Iterable[AffectedObject] = (),
    idle_after_s: float = 600.0,
) -> VisibleCluster:
    """Return what a viewer may see of a projection."""
    return VisibleCluster(
        projection=board,
        components=tuple(missing),
        data=DataAge(),
        visible=visible,
        now=now,
        idle_after_s=idle_after_s,
    )


def devices_of(cluster: VisibleCluster) -> list[DeviceView]:
    """Return the devices that are sent to the page."""
    return [msgspec.json.decode(raw, type=DeviceView) for raw in cluster.state("x").devices]


def usage(*shares: ShareMeasurement, hardware: Iterable[Hardware] = ()) -> UsageReply:
    return UsageReply(measured_at=0.0, shares=shares, hardware=tuple(hardware))


def budget(
    namespace: str = "a", state: str = "ok", at: float = 1.0, **fields: Any
) -> BudgetChanged:
    return BudgetChanged(
        namespace=Namespace(namespace),
        state=state,
        previous_state="ok",
        lease_class="guaranteed",
        reported_at=at,
        **fields,
    )


def eviction(pod: str, at: float, **changes: Any) -> EvictionRecord:
    """A pod of the namespace a was evicted for b/urgent."""
    fields: dict[str, Any] = {
        "at": at,
        "preemption": "uid-for",
        "pod": PodUid(pod),
        "namespace": Namespace("a"),
        "name": pod,
        "node": NodeName("n1"),
        "owner": "",
        "cause": PreemptionCause.PRIORITY,
        "budget": "",
        "devices": (),
        "outcome": EvictionOutcome.EVICTED,
        "for_pod": "uid-for",
        "for_namespace": "b",
        "for_name": "urgent",
    }
    return EvictionRecord(**fields | changes)
