"""The state of a running Leasehold at about one moment, as `audit` compares it; pure."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from services.cli.pod_summary import PodSummary
from shared.ledger.total_checks import Difference, LedgerReading
from shared.model.budgets.cost_records import CostHour
from shared.model.devices.device import Device, DeviceUse
from shared.model.events.claim_events import AllocatedClaim
from shared.model.events.node_events import Allocation
from shared.model.leases.lease import Lease, Share
from shared.model.leases.ledger import NodeTotals, UnreadableRecord, WaitingPod
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid

EXPIRE_S = 5.0
"""How much longer than its time a reservation may last: binders sweep every second."""
REPORT_S = 12.0
"""A node agent reports its devices every 10 s."""
EXPLAIN_S = 15.0
"""A pending pod is bound or explained within this time."""
OUTLIVE_S = 30.0
"""A lease may outlive its pod for this time."""


def lasting_differences(
    current: Iterable[Difference], first_seen: Mapping[Difference, float], now: float
) -> tuple[tuple[Difference, ...], dict[Difference, float]]:
    """Return the differences that have lasted too long, and when each was first seen."""
    seen = {difference: first_seen.get(difference, now) for difference in current}
    lasting = tuple(d for d, first in seen.items() if now - first >= d.settles_s)
    return lasting, seen


def device_difference(invariant: str, device: Device, text: str) -> Difference:
    """After a rebuild, the size of a device is not known until it is reported."""
    is_reported = device.index >= 0
    return Difference(invariant, f"device {device.uuid}", text, 0.0 if is_reported else REPORT_S)


def pod_name(pod: PodSummary | Lease) -> str:
    return f"pod {pod.namespace}/{pod.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowTotals:
    namespace: Namespace
    window: str
    used_units: int
    entered_units: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot(LedgerReading):
    read_at: float
    waiting: tuple[WaitingPod, ...] = ()
    pods: tuple[PodSummary, ...] = ()
    claims: tuple[AllocatedClaim, ...] | None = None
    """With devices of our driver, or None if they were not read."""
    allocations: Mapping[NodeName, tuple[Allocation, ...]] = field(default_factory=dict)
    """Of nodes whose agent's checkpoint is readable on this machine."""
    api_nodes: frozenset[NodeName] | None = None
    """None if they were not read."""
    gangs: Mapping[str, frozenset[PodUid]] = field(default_factory=dict)
    """Lease holders, as the ledger counts them."""
    waiting_gangs: Mapping[str, frozenset[PodUid]] = field(default_factory=dict)
    """Pods that wait, as the ledger counts them."""
    budget_windows: tuple[WindowTotals, ...] = ()
    cost_hours: tuple[CostHour, ...] = ()
    damaged: tuple[UnreadableRecord, ...] = ()
    """In the last 24 hours; they were written anew."""
    not_checked: tuple[str, ...] = ()
    """What this machine could not read."""

    @property
    def devices(self) -> dict[DeviceUuid, tuple[NodeName, Device, DeviceUse]]:
        return {
            device.uuid: (totals.node.facts.name, device, use)
            for totals in self.nodes
            for device, use in totals.node.devices
        }


def shares_on(totals: NodeTotals, device: DeviceUuid) -> Iterator[tuple[Lease, Share]]:
    """In the order of their slots."""
    shares = [
        (lease, share)
        for lease in totals.leases
        for share in lease.shares
        if share.device == device
    ]
    yield from sorted(shares, key=lambda pair: (pair[1].slot is None, pair[1].slot, pair[1].fence))
