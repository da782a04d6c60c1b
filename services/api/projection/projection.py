"""The cluster as the page shows it: nodes with their leases, waiting pods, budgets, events; pure.

All input is absolute, so that duplicates change nothing. Methods that update return the keys of
what has changed. `now` is in Unix seconds.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Annotated

import msgspec
from msgspec import Meta, Raw, structs

from services.api.projection.lease_views import closed_by, device_view, held_share, phase_of
from services.api.projection.page_views import BudgetSummary, NamespaceView, NodeView
from services.api.projection.recent_events import PodEvent, ProblemKey, RecentEvents
from shared.model.budgets.budget import UNITS_PER_GPU_MINUTE, Budget, LeaseClass
from shared.model.budgets.fair_share import Entitlement, FairShare, GpuAmount, fair_queue
from shared.model.budgets.weights import weigh
from shared.model.devices.device import Device, Hardware
from shared.model.devices.node import CORDONED, cordon_reason
from shared.model.events.pod_events import BudgetChanged, PodGated
from shared.model.events.request_reply import UsageReply
from shared.model.leases.lease import (
    LIVE,
    Lease,
    ProcessUse,
    Share,
    ShareKey,
    bookings,
    share_key,
)
from shared.model.leases.ledger import NodeTotals, WaitingPod, waits_for_budget
from shared.model.leases.preemption import PreemptionState
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.views.gpus import DeviceReservation, DeviceView, HeldShare, MeasuredView
from shared.model.views.leases import StartView
from shared.model.views.pods import ProcessView
from shared.placing.run_times import RunTimes
from shared.placing.starts import LeaseEnd, lease_end

ChangeKey = tuple[str, str]
"""A changed item: (`device`, uuid), (`node`, name), or a list: (`waiting`, ``)."""
WAITING: ChangeKey = ("waiting", "")
EVENTS: ChangeKey = ("events", "")
NAMESPACES: ChangeKey = ("namespaces", "")
PROBLEMS: ChangeKey = ("problems", "")
DATA: ChangeKey = ("data", "")

_encode = msgspec.json.Encoder().encode
_NamespaceUsage = Counter[str]
"""By the fields of `NamespaceView`."""


EncodedDevice = Annotated[Raw, Meta(extra_json_schema={"$ref": "#/components/schemas/DeviceView"})]


def encoded(view: DeviceView) -> EncodedDevice:
    return Raw(_encode(view))


class Projection:
    def __init__(self) -> None:
        self.run_times = RunTimes()
        self.starts: dict[PodUid, StartView] = {}
        self.nodes: dict[NodeName, NodeView] = {}
        self.devices: dict[DeviceUuid, DeviceView] = {}
        self.totals: dict[NodeName, NodeTotals] = {}
        self.waiting: dict[PodUid, WaitingPod] = {}
        self.gated: dict[PodUid, WaitingPod] = {}
        """At the scheduling gate of their namespace's budget."""
        self.budgets: dict[Namespace, BudgetChanged] = {}
        self.hardware: dict[DeviceUuid, Hardware] = {}
        self.events = RecentEvents(self.lease_of)
        self._usage: dict[NodeName, dict[Namespace, _NamespaceUsage]] = {}
        self._total_usage: dict[Namespace, _NamespaceUsage] | None = None
        """None since a node's usage has changed."""
        self._encoded: dict[DeviceUuid, tuple[DeviceView, EncodedDevice]] = {}
        self._measured: dict[NodeName, Mapping[ShareKey, MeasuredView]] = {}
        self._running: dict[NodeName, Mapping[ShareKey, tuple[ProcessUse, ...]]] = {}
        self._reservations: Mapping[DeviceUuid, DeviceReservation] = {}

    def update_nodes(
        self, requested: Iterable[NodeName], totals: Iterable[NodeTotals]
    ) -> frozenset[ChangeKey]:
        """Requested nodes that are not among `totals` are removed."""
        changed: set[ChangeKey] = set()
        by_name = {node_totals.node.facts.name: node_totals for node_totals in totals}
        for name in {*requested, *by_name}:
            node = by_name.get(name)
            changed |= self._remove_node(name) if node is None else self._update_node(name, node)
        return frozenset(changed)

    def _update_node(self, name: NodeName, totals: NodeTotals) -> set[ChangeKey]:
        facts = totals.node.facts
        served = totals.node.served
        measured = self._measured.get(name, {})
        shares = _shares_by_device(totals.leases)
        closed = facts.closed_devices
        node = NodeView(
            node=name,
            cordoned=cordon_reason(served),
            unschedulable=facts.unschedulable,
            cordoned_by=facts.cordoned_by,
            other_manager=facts.other_manager,
            deleted=not facts.allocatable and not facts.labels,
            devices=tuple(device.uuid for device, _ in totals.node.devices),
        )
        devices = [
            device_view(
                node,
                device,
                use,
                excluded=_excluded(device, closed),
                shares=_with_usage(shares.get(device.uuid, ()), measured),
                reservation=self._reservations.get(device.uuid),
            )
            for device, use in totals.node.devices
        ]
        before = self.nodes.get(name)
        changed = self._remove_devices(set(before.devices if before else ()) - set(node.devices))
        if before != node:
            self.nodes[name] = node
            changed.add(("node", name))
        for view in devices:
            if self.devices.get(view.uuid) != view:
                self.devices[view.uuid] = view
                changed.add(("device", view.uuid))
        earlier = self.totals.get(name)
        self.totals[name] = totals
        if (earlier.leases if earlier else ()) != totals.leases:
            self._usage[name] = _usage_by_namespace(totals.leases)
            self._total_usage = None
            changed.add(NAMESPACES)
        return changed

    def _remove_node(self, name: NodeName) -> set[ChangeKey]:
        node = self.nodes.pop(name, None)
        if node is None:
            return set()
        self.totals.pop(name, None)
        self._usage.pop(name, None)
        self._total_usage = None
        self._measured.pop(name, None)
        return {("node", name), NAMESPACES, *self._remove_devices(node.devices)}

    def _remove_devices(self, uuids: Iterable[DeviceUuid]) -> set[ChangeKey]:
        removed = [uuid for uuid in uuids if self.devices.pop(uuid, None) is not None]
        for uuid in removed:
            self.hardware.pop(uuid, None)
            self._encoded.pop(uuid, None)
        return {("device", uuid) for uuid in removed}

    def encoded(self, view: DeviceView) -> EncodedDevice:
        kept = self._encoded.get(view.uuid)
        if kept is None or kept[0] is not view:
            kept = view, encoded(view)
            self._encoded[view.uuid] = kept
        return kept[1]

    def leases_of(self, nodes: Iterable[NodeName]) -> dict[PodUid, Lease]:
        read = (self.totals[name] for name in nodes if name in self.totals)
        return {lease.pod: lease for totals in read for lease in totals.leases}

    def leased_nodes(self) -> list[NodeName]:
        return sorted(name for name, totals in self.totals.items() if totals.leases)

    def closed_by(self, view: DeviceView) -> str:
        return closed_by(view, self.nodes.get(view.node))

    def unmeasured_nodes(self) -> list[NodeName]:
        return [name for name in self.leased_nodes() if name not in self._measured]

    def update_measured(
        self, name: NodeName, reply: UsageReply | None, *, now: float, idle_after_s: float
    ) -> frozenset[ChangeKey]:
        """None if the agent did not reply."""
        self._update_hardware(name, reply.hardware if reply else ())
        measured = {
            share.key: MeasuredView.from_attributes(
                share, idle=share.is_idle(now, after_s=idle_after_s)
            )
            for share in (reply.shares if reply else ())
        }
        if reply is None:
            self._measured.pop(name, None)
            self._running.pop(name, None)
        else:
            self._measured[name] = measured
            self._running[name] = {share.key: share.running for share in reply.shares}
        changed: set[ChangeKey] = set()
        node = self.nodes.get(name)
        for uuid in node.devices if node else ():
            view = self.devices[uuid]
            shares = _with_usage(view.shares, measured)
            if shares != view.shares:
                self.devices[uuid] = structs.replace(view, shares=shares)
                changed.add(("device", uuid))
        return frozenset(changed)

    def _update_hardware(self, name: NodeName, hardware: Iterable[Hardware]) -> None:
        node = self.nodes.get(name)
        for uuid in node.devices if node else ():
            self.hardware.pop(uuid, None)
        for sensors in hardware:
            if node and sensors.device in node.devices:
                self.hardware[sensors.device] = sensors

    def update_waiting(
        self, pods: Iterable[WaitingPod], *, requested: Iterable[PodUid] | None = None
    ) -> frozenset[ChangeKey]:
        waiting = {waiting_pod.queued.pod: waiting_pod for waiting_pod in pods}
        removed = set(self.waiting if requested is None else requested) - waiting.keys()
        changed = [
            pod for pod, waiting_pod in waiting.items() if self.waiting.get(pod) != waiting_pod
        ]
        removed &= self.waiting.keys()
        if not changed and not removed:
            return frozenset()
        for pod in removed:
            del self.waiting[pod]
        self.waiting.update(waiting)
        return frozenset({WAITING, NAMESPACES})

    def update_gated(self, pods: Iterable[PodGated]) -> frozenset[ChangeKey]:
        ordered = sorted(pods, key=lambda pod: (-pod.priority, pod.created_at, pod.name))
        before, self.gated = self.gated, {gated.pod: waits_for_budget(gated) for gated in ordered}
        return frozenset() if self.gated == before else frozenset({WAITING, NAMESPACES})

    def update_budgets(self, events: Iterable[BudgetChanged]) -> frozenset[ChangeKey]:
        """Older events are ignored."""
        before = dict(self.budgets)
        changed: set[ChangeKey] = set()
        for event in events:
            earlier = self.budgets.get(event.namespace)
            if earlier is None or earlier.reported_at <= event.reported_at:
                self.budgets[event.namespace] = event
                if earlier is not None and earlier.state != event.state:
                    self.events.add_budget_state(event.namespace, event.state, event.reported_at)
                    changed.add(EVENTS)
        return frozenset(changed if self.budgets == before else {*changed, NAMESPACES})

    def add_problems(self, problems: Collection[ProblemKey], now: float) -> frozenset[ChangeKey]:
        return frozenset({EVENTS}) if self.events.add_problems(problems, now) else frozenset()

    def add_events(self, events: Sequence[PodEvent], now: float) -> frozenset[ChangeKey]:
        return frozenset({EVENTS}) if self.events.add(events, now) else frozenset()

    def update_preemptions(self, state: PreemptionState) -> frozenset[ChangeKey]:
        is_new = self.events.add_evictions(state.evictions)
        changed = set(self.update_budgets((state.budgets or {}).values()))
        starts = {
            reservation.pod: StartView(at=start.at, promised=start.enforced, text=start.text)
            for start in state.starts
            for reservation in start.wanted
        }
        if starts != self.starts:
            self.starts = starts
            changed.add(WAITING)
        changed |= self._update_reservations(_reservations(state))
        return frozenset(changed | {EVENTS} if is_new else changed)

    def _update_reservations(
        self, reservations: Mapping[DeviceUuid, DeviceReservation]
    ) -> set[ChangeKey]:
        before, self._reservations = self._reservations, reservations
        changed = {
            uuid
            for uuid in before.keys() | reservations.keys()
            if before.get(uuid) != reservations.get(uuid) and uuid in self.devices
        }
        for uuid in changed:
            view = structs.replace(self.devices[uuid], reservation=reservations.get(uuid))
            self.devices[uuid] = structs.replace(view, phase=phase_of(view, self.nodes[view.node]))
        return {("device", uuid) for uuid in changed}

    def end_of(self, lease: Lease, now: float) -> LeaseEnd | None:
        return lease_end(lease, now, self.run_times.expected_s(lease))

    def queue(self) -> list[WaitingPod]:
        """Return the waiting pods in the order in which freed capacity is offered."""
        return fair_queue(self.waiting.values(), self.fair_share())

    def waiting_pods(self) -> list[WaitingPod]:
        """Pods that wait for a budget come last."""
        return [*self.queue(), *self.gated.values()]

    def fair_share(self) -> FairShare:
        healthy = [view for view in self.devices.values() if view.healthy]
        used = {
            name: GpuAmount(cores_percent=usage["cores_percent"], memory_mib=usage["memory_mib"])
            for name, usage in self._usage_of_namespaces().items()
        }
        return FairShare(
            total=GpuAmount(
                cores_percent=100 * len(healthy),
                memory_mib=sum(device.memory_mib for device in healthy),
            ),
            used=used,
            entitlements={
                name: Entitlement(
                    weight=budget.weight, has_budget=budget.lease_class == LeaseClass.GUARANTEED
                )
                for name, budget in self.budgets.items()
            },
        )

    def _usage_of_namespaces(self) -> Mapping[Namespace, _NamespaceUsage]:
        if self._total_usage is None:
            self._total_usage = self._add_up_usage()
        return self._total_usage

    def _add_up_usage(self) -> dict[Namespace, _NamespaceUsage]:
        total: dict[Namespace, _NamespaceUsage] = {}
        for usage_on_node in self._usage.values():
            for name, usage in usage_on_node.items():
                sums = total.setdefault(name, Counter())
                for kind, amount in usage.items():  # Counter.update takes five times as long
                    sums[kind] += amount
        return total

    def namespaces(self) -> list[NamespaceView]:
        total = self._usage_of_namespaces()
        pods = chain(self.waiting.values(), self.gated.values())
        waiting = Counter(pod.queued.namespace for pod in pods)
        names = sorted({*total, *waiting, *self.budgets})
        return [
            NamespaceView(
                namespace=name,
                waiting=waiting[name],
                budget=_summary_of(self.budgets.get(name)),
                **total.get(name, Counter()),
            )
            for name in names
        ]

    def known_namespaces(self) -> frozenset[Namespace]:
        return frozenset(
            {
                *self._usage_of_namespaces(),
                *(pod.queued.namespace for pod in self.waiting.values()),
                *(pod.queued.namespace for pod in self.gated.values()),
                *self.budgets,
                *(event.namespace for event in self.events.latest if event.namespace),
                *(event.for_namespace for event in self.events.latest if event.beneficiary),
            }
        )

    def usage_of(self, lease: Lease, share: Share) -> MeasuredView | None:
        return self._measured.get(lease.node, {}).get(share_key(lease.pod, share))

    def processes_of(self, lease: Lease) -> Iterator[ProcessView]:
        running = self._running.get(lease.node, {})
        for share in lease.shares:
            for process in running.get(share_key(lease.pod, share), ()):
                yield ProcessView.from_attributes(process, share)

    def lease_of(self, pod: PodUid) -> Lease | None:
        """Return the lease of a pod, or of a ResourceClaim that it uses."""
        leases = (lease for totals in self.totals.values() for lease in totals.leases)
        return next((lease for lease in leases if pod in (lease.pod, *lease.users)), None)

    def uid_of(self, namespace: Namespace, name: str) -> PodUid | None:
        """Return the UID of the latest pod of a name, or None."""
        wanted = namespace, name
        for totals in self.totals.values():
            for lease in totals.leases:
                if (lease.namespace, lease.name) == wanted:
                    return lease.pod
        for waiting in chain(self.waiting.values(), self.gated.values()):
            if (waiting.queued.namespace, waiting.queued.name) == wanted:
                return waiting.queued.pod
        latest = reversed(self.events.latest)
        return next(
            (event.pod for event in latest if (event.namespace, event.name) == wanted), None
        )


def _reservations(state: PreemptionState) -> dict[DeviceUuid, DeviceReservation]:
    reservations: dict[DeviceUuid, DeviceReservation] = {}
    for stored in state.open:
        preemption = stored.preemption
        if stored.claimed:
            view = DeviceReservation(
                namespace=preemption.preemptor_namespace, name=preemption.preemptor_name
            )
            reservations |= dict.fromkeys(preemption.devices, view)
    for start in state.starts:
        [first, *_] = start.wanted
        name = f"gang {start.gang.name.rpartition('/')[2]}" if start.gang else first.name
        view = DeviceReservation(namespace=first.namespace, name=name, until=start.at)
        reservations |= dict.fromkeys(start.devices, view)
    return reservations


def _excluded(device: Device, closed: Mapping[int, str]) -> str:
    """Return why annotations close a device; of a sick one, unless its agent has written them."""
    reason = closed.get(device.index, "")
    return reason if device.healthy or reason.startswith(CORDONED) else ""


def _usage_by_namespace(leases: Iterable[Lease]) -> dict[Namespace, _NamespaceUsage]:
    usage_by_namespace: dict[Namespace, _NamespaceUsage] = {}
    devices: dict[Namespace, set[DeviceUuid]] = {}
    for lease in leases:
        usage = usage_by_namespace.setdefault(lease.namespace, Counter())
        usage["leases"] += 1
        usage["milli_gpu"] += weigh(lease, Budget(namespace=lease.namespace), {}).milli_gpu
        for booking in bookings(lease.shares):
            usage["memory_mib"] += booking.memory_mib
            usage["cores_percent"] += booking.cores_percent
            devices.setdefault(lease.namespace, set()).add(booking.device)
    for name, usage in usage_by_namespace.items():
        usage["devices"] = len(devices.get(name, ()))
    return usage_by_namespace


def _shares_by_device(leases: Iterable[Lease]) -> Mapping[DeviceUuid, tuple[HeldShare, ...]]:
    shares: dict[DeviceUuid, list[HeldShare]] = {}
    for lease in leases:
        for share in lease.shares if lease.state in LIVE else ():
            shares.setdefault(share.device, []).append(held_share(lease, share))
    return {uuid: tuple(sorted(views, key=_display_order)) for uuid, views in shares.items()}


def _display_order(view: HeldShare) -> tuple[bool, int, int]:
    return (view.slot is None, view.slot or 0, view.fence)


def _with_usage(
    shares: Iterable[HeldShare], usage: Mapping[ShareKey, MeasuredView]
) -> tuple[HeldShare, ...]:
    return tuple(
        share if share.measured == measured else structs.replace(share, measured=measured)
        for share in shares
        for measured in (usage.get(_key_of(share)),)
    )


def _key_of(share: HeldShare) -> ShareKey:
    position = None if share.mig is None else share.mig.position
    return share.pod, share.container, share.device, position


def _summary_of(event: BudgetChanged | None) -> BudgetSummary | None:
    if event is None:
        return None
    remaining = event.remaining_units
    return BudgetSummary(
        state=event.state,
        lease_class=event.lease_class,
        new_pods=event.new_pods,
        window=event.window,
        used_minutes=event.used_units / UNITS_PER_GPU_MINUTE,
        remaining_minutes=None if remaining is None else remaining / UNITS_PER_GPU_MINUTE,
        current_rate_milli_gpu=event.current_rate_milli_gpu,
        exhausted_at=event.exhausted_at,
        at=event.reported_at,
        currency=event.currency,
    )
