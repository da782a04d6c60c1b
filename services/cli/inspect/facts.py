"""What was read of a running Leasehold at about one moment: all that is shown comes of it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from services.timekeeper.accounts.account_audit import Book
from shared.model.device import Device, DeviceUse
from shared.model.events.node_events import Allocation
from shared.model.fair_share import FairShare
from shared.model.lease import Lease, Share
from shared.model.ledger import NodeTotals, WaitingPod
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.quota import QuotaTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSeen:
    """A pod as the API server has it."""

    pod: PodUid
    namespace: Namespace
    name: str
    node: str = ""
    phase: str = ""
    scheduler: str = ""
    created_at: float = 0.0
    gates: tuple[str, ...] = ()
    """Its scheduling gates."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    said: str = ""
    """The message of the condition PodScheduled while it is false."""

    @property
    def lives(self) -> bool:
        """Whether its containers run or may yet run."""
        return self.phase not in {"Succeeded", "Failed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The ledger, the pods and what the agents told the kubelets."""

    read_at: float
    accounts: tuple[NodeTotals, ...] = ()
    waiting: tuple[WaitingPod, ...] = ()
    pods: tuple[PodSeen, ...] = ()
    allocations: Mapping[NodeName, tuple[Allocation, ...]] = field(default_factory=dict)
    """Only of nodes whose agent's checkpoint could be read here."""
    gangs: Mapping[str, frozenset[PodUid]] = field(default_factory=dict)
    """The pods that the ledger counts as holding a lease of each gang."""
    quotas: QuotaTotals = field(default_factory=QuotaTotals)
    kept: Mapping[NodeName, Mapping[str, int]] = field(default_factory=dict)
    """What of nodes' ordinary resources is kept for pods for which leases are being taken back."""
    books: tuple[Book, ...] = ()
    """Of every namespace's open budget window."""
    unseen: tuple[str, ...] = ()
    """What could not be read from here, in words."""
    turns: FairShare = field(default_factory=FairShare)
    """What decides the order of those that wait, as the ledger keeps it."""

    @property
    def leases(self) -> tuple[Lease, ...]:
        """Every live lease, oldest first."""
        found = [lease for account in self.accounts for lease in account.leases]
        return tuple(sorted(found, key=lambda lease: (lease.created_at, lease.name)))

    @property
    def devices(self) -> dict[DeviceUuid, tuple[NodeName, Device, DeviceUse]]:
        """Every device with its node and its stored totals."""
        return {
            device.uuid: (account.node.facts.name, device, use)
            for account in self.accounts
            for device, use in account.node.devices
        }

    @property
    def sick(self) -> dict[DeviceUuid, str]:
        """What is wrong with the devices that are not healthy."""
        return {
            device.uuid: device.fault or "it is not healthy"
            for account in self.accounts
            for device, _ in account.node.devices
            if not device.healthy
        }


def shares_on(account: NodeTotals, device: DeviceUuid) -> Iterator[tuple[Lease, Share]]:
    """Return the shares of one device with their leases, in the order of their slots."""
    found = [
        (lease, share)
        for lease in account.leases
        for share in lease.shares
        if share.device == device
    ]
    yield from sorted(found, key=lambda pair: (pair[1].slot is None, pair[1].slot, pair[1].fence))
