"""The cluster as the page shows it: nodes with their leases, what waits, budgets, news, silence.

All that comes in is absolute, so that hearing it twice changes nothing; every method answers with
the keys of what looks different now. No clock: `now` is an argument, Unix seconds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.dashboard.recent_events import News, Ticker
from shared.model.budget import LeaseClass
from shared.model.device import Device, DeviceUse
from shared.model.events.pod_events import BudgetChanged
from shared.model.fair_share import Entitlement, FairShare, GpuAmount, fair_order
from shared.model.lease import LIVE, Lease, Share, bookings
from shared.model.ledger import NodeTotals, WaitingPod
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid

Key = tuple[str, str]
"""What looks different: (`device`, uuid), (`node`, name), or a list: (`waiting`, ``)."""
WAITING: Key = ("waiting", "")
TICKER: Key = ("ticker", "")
NAMESPACES: Key = ("namespaces", "")
SILENT: Key = ("silent", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldShare:
    """One share of a device, with what of its lease is shown."""

    pod: PodUid
    namespace: Namespace
    name: str
    state: str
    created_at: float
    expires_at: float
    dialect: str
    gang: str
    version: int
    share: Share


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceShown:
    """One device, what is taken of it and by whom, in the order of slots."""

    node: NodeName
    device: Device
    use: DeviceUse
    closed: bool = False
    """An annotation of the node closes it to new shares."""
    shares: tuple[HeldShare, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShown:
    """A node but for what its devices hold."""

    name: NodeName
    devices: tuple[DeviceUuid, ...]
    unschedulable: bool = False
    gone: bool = False
    """The API server no longer tells of it; leases of it are not ended yet."""


@dataclass(slots=True)
class _Holding:
    """What a namespace holds of one node, or of all."""

    leases: int = 0
    devices: int = 0
    memory_mib: int = 0
    cores_percent: int = 0

    def add(self, other: "_Holding") -> None:
        self.leases += other.leases
        self.devices += other.devices
        self.memory_mib += other.memory_mib
        self.cores_percent += other.cores_percent


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceShown:
    """What a namespace holds and waits for, and how its budget stands."""

    namespace: Namespace
    leases: int = 0
    devices: int = 0
    memory_mib: int = 0
    cores_percent: int = 0
    waiting: int = 0
    budget: BudgetChanged | None = None


class Projection:
    """Everything that is shown, as last heard."""

    def __init__(self) -> None:
        self.nodes: dict[NodeName, NodeShown] = {}
        self.devices: dict[DeviceUuid, DeviceShown] = {}
        self.leases: dict[NodeName, tuple[Lease, ...]] = {}
        self.waiting: dict[PodUid, WaitingPod] = {}
        self.budgets: dict[Namespace, BudgetChanged] = {}
        self.ticker = Ticker()
        self._holdings: dict[NodeName, dict[Namespace, _Holding]] = {}

    def take_nodes(
        self, asked: Iterable[NodeName], accounts: Iterable[NodeTotals]
    ) -> frozenset[Key]:
        """Take over nodes as they are; those asked for and not among them are gone."""
        changed: set[Key] = set()
        found = {account.node.facts.name: account for account in accounts}
        for name in {*asked, *found}:
            account = found.get(name)
            changed |= self._drop(name) if account is None else self._take(name, account)
        return frozenset(changed)

    def _take(self, name: NodeName, account: NodeTotals) -> set[Key]:
        closed = account.node.facts.excluded_devices
        held = _held_on(account.leases)
        devices = [
            DeviceShown(
                node=name,
                device=device,
                use=use,
                closed=device.index in closed,
                shares=held.get(device.uuid, ()),
            )
            for device, use in account.node.devices
        ]
        node = NodeShown(
            name=name,
            devices=tuple(shown.device.uuid for shown in devices),
            unschedulable=account.node.facts.unschedulable,
            gone=not account.node.facts.allocatable and not account.node.facts.labels,
        )
        before = self.nodes.get(name)
        changed = self._forget_devices(set(before.devices if before else ()) - set(node.devices))
        if before != node:
            self.nodes[name] = node
            changed.add(("node", name))
        for shown in devices:
            if self.devices.get(shown.device.uuid) != shown:
                self.devices[shown.device.uuid] = shown
                changed.add(("device", shown.device.uuid))
        if self.leases.get(name, ()) != account.leases:
            self.leases[name] = account.leases
            self._holdings[name] = _holdings(account.leases)
            changed.add(NAMESPACES)
        return changed

    def _drop(self, name: NodeName) -> set[Key]:
        node = self.nodes.pop(name, None)
        if node is None:
            return set()
        self.leases.pop(name, None)
        self._holdings.pop(name, None)
        return {("node", name), NAMESPACES, *self._forget_devices(node.devices)}

    def _forget_devices(self, uuids: Iterable[DeviceUuid]) -> set[Key]:
        gone = [uuid for uuid in uuids if self.devices.pop(uuid, None) is not None]
        return {("device", uuid) for uuid in gone}

    def take_waiting(
        self, found: Iterable[WaitingPod], *, asked: Iterable[PodUid] | None = None
    ) -> frozenset[Key]:
        """Take over who waits: all that do, or those of the pods asked for."""
        waiting = {one.queued.pod: one for one in found}
        gone = set(self.waiting if asked is None else asked) - waiting.keys()
        different = [pod for pod, one in waiting.items() if self.waiting.get(pod) != one]
        gone &= self.waiting.keys()
        if not different and not gone:
            return frozenset()
        for pod in gone:
            del self.waiting[pod]
        self.waiting.update(waiting)
        return frozenset({WAITING, NAMESPACES})

    def take_budgets(self, events: Iterable[BudgetChanged]) -> frozenset[Key]:
        """Take over how namespaces stand; what is older than what is known is passed over."""
        for event in events:
            known = self.budgets.get(event.namespace)
            if known is None or known.at <= event.at:
                self.budgets[event.namespace] = event
        return frozenset({NAMESPACES})

    def hear(self, events: Sequence[News], now: float) -> frozenset[Key]:
        """Add a line to the ticker for each piece of news that is one."""
        return frozenset({TICKER}) if self.ticker.hear(events, now) else frozenset()

    def queue(self) -> list[WaitingPod]:
        """Return who waits, in the order in which freed capacity is offered."""
        by_pod = {each.queued.pod: each for each in self.waiting.values()}
        order = fair_order((each.queued for each in self.waiting.values()), self._turns())
        return [by_pod[queued.pod] for queued in order]

    def _turns(self) -> FairShare:
        healthy = [shown.device for shown in self.devices.values() if shown.device.healthy]
        taken: dict[Namespace, GpuAmount] = {}
        for holdings in self._holdings.values():
            for name, part in holdings.items():
                more = GpuAmount(cores_percent=part.cores_percent, memory_mib=part.memory_mib)
                taken[name] = taken.get(name, GpuAmount()).plus(more)
        return FairShare(
            total=GpuAmount(
                cores_percent=100 * len(healthy),
                memory_mib=sum(device.memory_mib for device in healthy),
            ),
            used=taken,
            entitlements={
                name: Entitlement(
                    weight=told.share, has_budget=told.lease_class == LeaseClass.GUARANTEED
                )
                for name, told in self.budgets.items()
            },
        )

    def namespaces(self) -> list[NamespaceShown]:
        """Add up what namespaces hold and wait for."""
        holding: dict[Namespace, _Holding] = {}
        for holdings in self._holdings.values():
            for name, part in holdings.items():
                holding.setdefault(name, _Holding()).add(part)
        waiting: dict[Namespace, int] = {}
        for each in self.waiting.values():
            waiting[each.queued.namespace] = waiting.get(each.queued.namespace, 0) + 1
        names = sorted({*holding, *waiting, *self.budgets})
        return [
            NamespaceShown(
                namespace=name,
                leases=one.leases,
                devices=one.devices,
                memory_mib=one.memory_mib,
                cores_percent=one.cores_percent,
                waiting=waiting.get(name, 0),
                budget=self.budgets.get(name),
            )
            for name in names
            for one in (holding.get(name) or _Holding(),)
        ]

    def known_namespaces(self) -> frozenset[Namespace]:
        """Return every namespace that anything shown belongs to."""
        return frozenset(
            {
                *(name for holdings in self._holdings.values() for name in holdings),
                *(each.queued.namespace for each in self.waiting.values()),
                *self.budgets,
                *(tick.namespace for tick in self.ticker.lines),
            }
        )

    def lease_of(self, pod: PodUid) -> Lease | None:
        """Return a pod's live lease."""
        found = (lease for leases in self.leases.values() for lease in leases if lease.pod == pod)
        return next(found, None)


def _holdings(leases: Iterable[Lease]) -> dict[Namespace, _Holding]:
    found: dict[Namespace, _Holding] = {}
    devices: dict[Namespace, set[DeviceUuid]] = {}
    for lease in leases:
        one = found.setdefault(lease.namespace, _Holding())
        one.leases += 1
        for booking in bookings(lease.shares):
            one.memory_mib += booking.memory_mib
            one.cores_percent += booking.cores_percent
            devices.setdefault(lease.namespace, set()).add(booking.device)
    for name, one in found.items():
        one.devices = len(devices.get(name, ()))
    return found


def _held_on(leases: Iterable[Lease]) -> Mapping[DeviceUuid, tuple[HeldShare, ...]]:
    found: dict[DeviceUuid, list[HeldShare]] = {}
    for lease in leases:
        if lease.state not in LIVE:
            continue
        for share in lease.shares:
            found.setdefault(share.device, []).append(
                HeldShare(
                    pod=lease.pod,
                    namespace=lease.namespace,
                    name=lease.name,
                    state=str(lease.state),
                    created_at=lease.created_at,
                    expires_at=lease.expires_at,
                    dialect=lease.dialect,
                    gang=lease.gang,
                    version=lease.version,
                    share=share,
                )
            )
    return {uuid: tuple(sorted(held, key=_place)) for uuid, held in found.items()}


def _place(held: HeldShare) -> tuple[bool, int, int]:
    share = held.share
    return (share.slot is None, share.slot or 0, share.fence)
