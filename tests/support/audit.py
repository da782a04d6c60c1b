"""Sound snapshots for the tests of the audit, and what it finds in them."""

from dataclasses import replace
from typing import Any

from services.cli.audit.invariants import differences
from services.cli.audit.snapshot import Snapshot
from services.cli.pod_summary import PodSummary
from shared.model.budgets.fair_share import fair_share_of
from shared.model.devices.device import Device, DeviceUse
from shared.model.devices.node import NodeFacts
from shared.model.events.node_events import Allocation
from shared.model.leases.lease import Lease, LeaseState, Share
from shared.model.leases.lease_copy import ANNOTATION, dump_lease
from shared.model.leases.ledger import LedgerNode, NodeTotals, WaitingPod, counted_use
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.requests.placement import Refusal
from shared.model.requests.request import Gang, PodRequest, SharingPolicy
from tests.support import build
from tests.support.build import allocation_of, pod_queued

NODE = NodeName("node-0")
GPU = DeviceUuid("GPU-0")
DEVICE = Device(uuid=GPU, index=0, model="Tesla T4", memory_mib=15_000, slots=4)
NOW = 1_000.0


def share(*, memory_mib: int = 3_000, cores: int = 30, slot: int = 0, fence: int = 1) -> Share:
    sharing = SharingPolicy.EXCLUSIVE if cores == 100 else SharingPolicy.SHARED
    held: dict[str, Any] = {"device_mib": 15_000, "memory_mib": memory_mib, "cores_percent": cores}
    return build.share(GPU, **held, sharing=sharing, slot=slot, fence=fence)


def lease(name: str, *shares: Share, node: NodeName = NODE) -> Lease:
    held: dict[str, Any] = {
        "resources": {"cpu": 500, "pods": 1},
        "state": LeaseState.BOUND,
        "created_at": 900.0,
    }
    return build.lease(f"uid-{name}", node, *(shares or (share(),)), name=name, **held)


def account(*leases: Lease, node: NodeName = NODE) -> NodeTotals:
    """Make the account whose totals are what the leases add up to."""
    devices, nodes = counted_use(leases)
    use = devices.get(GPU, DeviceUse())
    return NodeTotals(
        node=LedgerNode(
            facts=NodeFacts(name=node), used=nodes.get(node, {}), devices=((DEVICE, use),)
        ),
        leases=leases,
    )


def with_use(sound: NodeTotals, use: DeviceUse) -> NodeTotals:
    return replace(sound, node=replace(sound.node, devices=((DEVICE, use),)))


def pod(name: str, **changes: object) -> PodSummary:
    seen = PodSummary(
        pod=PodUid(f"uid-{name}"),
        namespace=Namespace("default"),
        name=name,
        node=NODE,
        phase="Running",
        scheduler="volcano",
        annotations={ANNOTATION: dump_lease(lease(name))},
    )
    return replace(seen, **changes)  # type: ignore[arg-type]


def facts(
    *accounts: NodeTotals, pods: tuple[PodSummary, ...] | None = None, **more: object
) -> Snapshot:
    held = {
        lease.name: pod(lease.name, node=lease.node, annotations={ANNOTATION: dump_lease(lease)})
        for a in accounts
        for lease in a.leases
    }
    seen = tuple(held.values()) if pods is None else pods
    turns = fair_share_of([DEVICE], [lease for account in accounts for lease in account.leases], {})
    values: dict[str, object] = {"fair_share": turns, **more}
    return Snapshot(read_at=NOW, nodes=accounts, pods=seen, **values)  # type: ignore[arg-type]


def found(facts: Snapshot) -> list[tuple[str, str]]:
    return [(difference.invariant, difference.text) for difference in differences(facts)]


def allocation(lease: Lease) -> Allocation:
    return allocation_of(lease, resource="volcano.sh/vgpu-number", device_ids=("GPU-0-0",))


GANG = Gang(name="default/g", min_member=2)


def waits(name: str, gang: Gang | None = None) -> WaitingPod:
    queued = pod_queued(f"uid-{name}", PodRequest(gang=gang), name=name, created_at=NOW)
    return WaitingPod(queued=queued, refusal=Refusal(reason="full"), capacity=0)
