"""The state of a running Leasehold at about one moment, as the commands show and audit it; pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from shared.model.device import Device, DeviceUse
from shared.model.events.claim_events import AllocatedClaim
from shared.model.events.node_events import Allocation
from shared.model.events.pod_events import PodQueued
from shared.model.fair_share import FairShare
from shared.model.lease import Lease, Share
from shared.model.ledger import NodeTotals, UnreadableRecord, WaitingPod
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.quota import QuotaTotals
from shared.model.usage import IDLE_AFTER_S, ShareKey, ShareMeasurement, share_key


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSummary:
    """A pod as the API server has it."""

    pod: PodUid
    namespace: Namespace
    name: str
    node: str = ""
    phase: str = ""
    scheduler: str = ""
    created_at: float = 0.0
    owner: str = ""
    """Kind and name of its controller, such as Job/train; empty: it has none."""
    gates: tuple[str, ...] = ()
    """Its scheduling gates."""
    claims: tuple[str, ...] = ()
    """What its spec calls its ResourceClaims."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    unschedulable_message: str = ""
    """The message of the condition PodScheduled while it is false."""
    rejection: str = ""
    """Why its kubelet rejected it, as `reason: message`; empty: it did not."""

    @property
    def is_active(self) -> bool:
        """Whether its containers run or may still run."""
        return self.phase not in {"Succeeded", "Failed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowTotals:
    """The usage of one budget window, as stored and as summed up from its entries."""

    namespace: Namespace
    window: str
    used_units: int
    """As the window has it."""
    entered_units: int
    """The sum of its entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredUsage:
    """The usage of leased shares, as the agents of their nodes measured it last."""

    shares: Mapping[ShareKey, ShareMeasurement] = field(default_factory=dict)
    unmeasured_nodes: tuple[NodeName, ...] = ()
    """Nodes with leases whose agent did not reply."""
    problem: str = ""
    """Why no usage was requested, as text."""
    missing_components: tuple[str, ...] = ()
    """Components that are missing or not ready, as the dashboard reports them."""
    read_at: float = 0.0
    """Unix seconds."""
    idle_after_s: float = IDLE_AFTER_S
    """Shares that have not been used for this long are marked as idle."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What is missing, if anything, as text."""
        silent = ", ".join(self.unmeasured_nodes)
        no_reply = silent and f"no reply from the agents of: {silent}; their usage is not shown"
        return (*self.missing_components, *filter(None, (self.problem, no_reply)))

    def of(self, lease: Lease, share: Share) -> ShareMeasurement | None:
        """Return the usage of a share; None: it was not measured."""
        return self.shares.get(share_key(lease.pod, share))

    def idle_since(self, lease: Lease, share: Share) -> float | None:
        """Return since when a share that is marked as idle has not been used; None: it is not."""
        measured = self.of(lease, share)
        if measured is None or not measured.is_idle(self.read_at, after_s=self.idle_after_s):
            return None
        return measured.idle_since

    def lease_idle_since(self, lease: Lease) -> float | None:
        """Return since when none of a lease's shares has been used; None: it is not idle."""
        shares = [share for share in lease.shares if not share.init]
        since = [self.idle_since(lease, share) for share in shares]
        known = [one for one in since if one is not None]
        return max(known) if known and len(known) == len(since) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The ledger, the pods, and the allocations in the agents' checkpoints."""

    read_at: float
    nodes: tuple[NodeTotals, ...] = ()
    waiting: tuple[WaitingPod, ...] = ()
    queue: tuple[PodUid, ...] | None = None
    """See `ClusterView`; None: all waiting pods are known, and their order follows."""
    pods: tuple[PodSummary, ...] = ()
    claims: tuple[AllocatedClaim, ...] | None = None
    """The ResourceClaims with devices of our driver; None: they were not read."""
    allocations: Mapping[NodeName, tuple[Allocation, ...]] = field(default_factory=dict)
    """Only of nodes whose agent's checkpoint is readable on this machine."""
    api_nodes: frozenset[NodeName] | None = None
    """The nodes that the API server has; None: they were not read."""
    gangs: Mapping[str, frozenset[PodUid]] = field(default_factory=dict)
    """The pods that the ledger counts as lease holders of each gang."""
    waiting_gangs: Mapping[str, frozenset[PodUid]] = field(default_factory=dict)
    """The pods that the ledger counts as waiting with each gang."""
    quotas: QuotaTotals = field(default_factory=QuotaTotals)
    preemption_claims: Mapping[NodeName, Mapping[str, int]] = field(default_factory=dict)
    """The nodes' ordinary resources that are reserved for pods for which others are evicted."""
    budget_windows: tuple[WindowTotals, ...] = ()
    """Every namespace's open budget window."""
    unreadable: tuple[UnreadableRecord, ...] = ()
    """Records that could not be read in the last 24 hours; they were rebuilt."""
    not_checked: tuple[str, ...] = ()
    """The parts that this machine could not read, as text."""
    fair_share: FairShare = field(default_factory=FairShare)
    """The usage that orders the waiting pods, as the ledger stores it."""
    usage: MeasuredUsage = field(default_factory=MeasuredUsage)

    @property
    def leases(self) -> tuple[Lease, ...]:
        """Every live lease, oldest first."""
        leases = [lease for node in self.nodes for lease in node.leases]
        return tuple(sorted(leases, key=lambda lease: (lease.created_at, lease.name)))

    @property
    def pod_names(self) -> list[str]:
        """The names of the pods with leases, and then of those that wait."""
        waiting = (one.queued.name for one in self.waiting)
        return list(dict.fromkeys((*(lease.name for lease in self.leases), *waiting)))

    def of_pods(self, namespace: str, name: str) -> "Snapshot":
        """Return it with the visible leases and waiting pods of a namespace and a name."""

        def is_selected(pod: Lease | PodQueued) -> bool:
            return (
                pod.namespace != "" and namespace in {"", pod.namespace} and name in {"", pod.name}
            )

        return replace(
            self,
            nodes=tuple(
                replace(node, leases=tuple(filter(is_selected, node.leases))) for node in self.nodes
            ),
            waiting=tuple(one for one in self.waiting if is_selected(one.queued)),
        )

    @property
    def devices(self) -> dict[DeviceUuid, tuple[NodeName, Device, DeviceUse]]:
        """Every device with its node and its stored totals."""
        return {
            device.uuid: (totals.node.facts.name, device, use)
            for totals in self.nodes
            for device, use in totals.node.devices
        }

    @property
    def device_faults(self) -> dict[DeviceUuid, str]:
        """The fault of each device that is not healthy."""
        return {
            device.uuid: device.fault or "it is not healthy"
            for totals in self.nodes
            for device, _ in totals.node.devices
            if not device.healthy
        }


def shares_on(totals: NodeTotals, device: DeviceUuid) -> Iterator[tuple[Lease, Share]]:
    """Return the shares of one device with their leases, in the order of their slots."""
    shares = [
        (lease, share)
        for lease in totals.leases
        for share in lease.shares
        if share.device == device
    ]
    yield from sorted(shares, key=lambda pair: (pair[1].slot is None, pair[1].slot, pair[1].fence))
