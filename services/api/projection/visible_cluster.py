"""The cluster as one viewer may see it; pure."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import is_
from typing import Any, TypeVar

from msgspec import UNSET, UnsetType, structs

from services.api.projection.handed_over import shown_refusal
from services.api.projection.lease_views import (
    by_pod,
    hidden_share,
    idle_holder,
    idle_milli_gpu,
    is_idle,
)
from services.api.projection.page_views import EventView, NamespaceView, NodeView, QueueView
from services.api.projection.problems import (
    AffectedObject,
    DataAge,
    Problem,
    affected_objects,
    problems_of,
    visible_reason,
)
from services.api.projection.projection import ChangeKey, EncodedDevice, Projection, encoded
from services.api.projection.recent_events import PROBLEM, SOLVED
from shared.model.budgets.fair_share import FairShare, precedence_reason
from shared.model.devices.device import Leftover, visible_fault
from shared.model.leases.lease import Lease, ends_by, expected_end
from shared.model.leases.ledger import WaitingPod
from shared.model.leases.preemption import EvictionRecord, Preemption, PreemptionState
from shared.model.names import Namespace, PodUid
from shared.model.views.budgets import IdleHolder, IdleView
from shared.model.views.gpus import (
    DeviceDetails,
    DeviceReservation,
    DeviceView,
    GpusView,
    HeldShare,
    MeasuredView,
    NodeDevices,
    ShareView,
)
from shared.model.views.leases import LeasesView, LeaseView, WaitingView
from shared.model.views.pods import (
    GangView,
    PodView,
    QueuePlace,
    ReasonCount,
    TraceView,
    WaitingDetails,
)
from shared.model.views.preemptions import EvictionView, PreemptionsView, PreemptionView, VictimView
from shared.model.views.view import View


class StateView(View, frozen=True, kw_only=True):
    """Everything that the page shows, and the position from which the events continue."""

    id: str
    now: float
    nodes: tuple[NodeView, ...]
    devices: tuple[EncodedDevice, ...]
    waiting: QueueView
    namespaces: tuple[NamespaceView, ...]
    events: tuple[EventView, ...]
    problems: tuple[Problem, ...]
    data: DataAge


class DeltaView(View, frozen=True, kw_only=True, omit_defaults=True):
    """What has changed; every value is absolute."""

    now: float
    nodes: tuple[NodeView, ...] = ()
    removed_nodes: tuple[str, ...] = ()
    devices: tuple[EncodedDevice, ...] = ()
    removed_devices: tuple[str, ...] = ()
    waiting: QueueView | UnsetType = UNSET
    namespaces: tuple[NamespaceView, ...] | UnsetType = UNSET
    events: tuple[EventView, ...] = ()
    problems: tuple[Problem, ...] | UnsetType = UNSET
    data: DataAge | UnsetType = UNSET
    """At least every 10 s."""


T = TypeVar("T")
NamespaceFilter = Callable[[Namespace], bool]
MAX_WAITING = 200


def all_namespaces(_: Namespace) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleCluster:
    projection: Projection
    components: Sequence[AffectedObject]
    data: DataAge
    visible: NamespaceFilter
    now: float
    idle_after_s: float

    def state(self, position: str) -> StateView:
        nodes = self.projection.nodes
        return StateView(
            id=position,
            now=self.now,
            nodes=tuple(self.node_view(nodes[name]) for name in sorted(nodes)),
            devices=tuple(map(self.encoded_device, self.projection.devices.values())),
            **{kind: value() for kind, value in self._lists(after_event=0).items()},
        )

    def delta(self, keys: Iterable[ChangeKey], *, after_event: int) -> DeltaView:
        changed: dict[str, list[str]] = {}
        for kind, name in sorted(keys):
            changed.setdefault(kind, []).append(name)
        lists = self._lists(after_event=after_event).items()
        devices, removed_devices = _present(changed.get("device", ()), self.projection.devices)
        nodes, removed_nodes = _present(changed.get("node", ()), self.projection.nodes)
        return DeltaView(
            now=self.now,
            devices=tuple(map(self.encoded_device, devices)),
            removed_devices=removed_devices,
            nodes=tuple(map(self.node_view, nodes)),
            removed_nodes=removed_nodes,
            **{kind: value() for kind, value in lists if kind in changed},
        )

    def _lists(self, *, after_event: int) -> dict[str, Callable[[], Any]]:
        return {
            "waiting": self.queue,
            "namespaces": self.namespaces,
            "events": lambda: self.events(after=after_event),
            "problems": self.all_problems,
            "data": lambda: self.data,
        }

    # Devices

    def gpus(self) -> GpusView:
        nodes = sorted(self.projection.nodes.values(), key=lambda view: view.node)
        return GpusView(
            read_at=self.now,
            nodes=tuple(self.node(view) for view in nodes if view.devices),
            unmeasured_nodes=tuple(self.projection.unmeasured_nodes()),
            problems=self.problems,
        )

    def all_problems(self) -> tuple[Problem, ...]:
        return problems_of(
            self.projection, self.components, self.data, visible=self.visible, now=self.now
        )

    def affected_objects(self) -> Iterator[AffectedObject]:
        return affected_objects(
            self.projection, self.components, self.data, visible=self.visible, now=self.now
        )

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(problem.text for problem in self.all_problems() if problem.severity == "error")

    def node(self, view: NodeView) -> NodeDevices:
        devices = [self.details(self.projection.devices[uuid]) for uuid in view.devices]
        devices.sort(key=lambda device: device.index)
        closed_by = self.node_view(view).closed_by
        return NodeDevices.from_attributes(view, cordoned=closed_by, devices=tuple(devices))

    def node_view(self, view: NodeView) -> NodeView:
        cordoned = visible_reason(view.cordoned, self.visible)
        return view if cordoned == view.cordoned else structs.replace(view, cordoned=cordoned)

    def details(self, view: DeviceView) -> DeviceDetails:
        hardware = self.projection.hardware.get(view.uuid)
        return DeviceDetails.from_attributes(self.device(view), hardware=hardware)

    def encoded_device(self, view: DeviceView) -> EncodedDevice:
        shown = self.device(view)
        return self.projection.encoded(view) if shown is view else encoded(shown)

    def device(self, view: DeviceView) -> DeviceView:
        """The device is copied only if something differs."""
        if self.visible is all_namespaces and not _any_unused(view.shares):
            return view
        shares = tuple(map(self._share, view.shares))
        differs = view.fault or view.leftovers or view.reservation or _any_idle(shares)
        if not differs and all(map(is_, shares, view.shares)):
            return view
        return structs.replace(
            view,
            fault=visible_fault(view.fault, self.visible),
            leftovers=tuple(map(self._leftover, view.leftovers)),
            shares=shares,
            reservation=self._reservation(view.reservation),
            idle_milli_gpu=idle_milli_gpu(share for share in shares if share.pod),
        )

    def _reservation(self, reservation: DeviceReservation | None) -> DeviceReservation | None:
        if reservation is None or self.visible(reservation.namespace):
            return reservation
        return structs.replace(reservation, namespace=Namespace(""), name="")

    def _leftover(self, leftover: Leftover) -> Leftover:
        if self.visible(leftover.namespace):
            return leftover
        return replace(leftover, namespace=Namespace(""), name="", pids=())

    def _share(self, share: HeldShare) -> HeldShare:
        if not self.visible(share.namespace):
            return hidden_share(share)
        measured = self._measured(share.measured)
        return share if measured is share.measured else structs.replace(share, measured=measured)

    def _measured(self, measured: MeasuredView | None) -> MeasuredView | None:
        since = measured.idle_since if measured else None
        idle = since is not None and self.now - since >= self.idle_after_s
        if measured is None or measured.idle == idle:
            return measured
        return structs.replace(measured, idle=idle)

    # Leases and waiting pods

    def leases(self, namespace: str = "", name: str = "") -> LeasesView:
        def is_selected(pod: Lease | WaitingView) -> bool:
            return namespace in {"", pod.namespace} and name in {"", pod.name}

        totals = self.projection.totals.values()
        leases = [lease for node in totals for lease in node.leases]
        shown = [lease for lease in leases if self.visible(lease.namespace) and is_selected(lease)]
        return LeasesView(
            read_at=self.now,
            idle_after_s=self.idle_after_s,
            leases=tuple(
                self.lease(lease) for lease in sorted(shown, key=lambda e: (e.created_at, e.name))
            ),
            waiting=tuple(filter(is_selected, self.waiting_pods())),
            unmeasured_nodes=tuple(self.projection.unmeasured_nodes()),
            problems=self.problems,
        )

    def lease(self, lease: Lease) -> LeaseView:
        devices = self.projection.devices
        held = [devices[uuid] for share in lease.shares if (uuid := share.device) in devices]
        learned_s = self.projection.run_times.expected_s(lease)
        is_expected = learned_s is not None or lease.term.expected_run_s is not None
        return LeaseView.from_attributes(
            lease,
            ends_by=ends_by(lease) if lease.activated_at else None,
            expected_end=expected_end(lease, learned_s) if is_expected else None,
            unhealthy_devices={
                view.uuid: visible_fault(view.fault, self.visible) or "it is not healthy"
                for view in held
                if not view.healthy
            },
            shares=tuple(
                ShareView.from_attributes(
                    share, measured=self._measured(self.projection.usage_of(lease, share))
                )
                for share in lease.shares
            ),
        )

    def idle(self, most: int | None) -> IdleView:
        parts: dict[PodUid, list[IdleHolder]] = {}
        for view in self.projection.devices.values():
            for shares in by_pod(map(self._share, view.shares)):
                if shares[0].pod and is_idle(shares):
                    parts.setdefault(shares[0].pod, []).append(idle_holder(shares, self.now))
        pods = [
            IdleHolder.total(
                held,
                self.now,
                pod=pod,
                namespace=held[0].namespace,
                name=held[0].name,
                owner=held[0].owner,
            )
            for pod, held in parts.items()
        ]
        pods.sort(key=lambda holder: (-holder.gpu_hours, holder.namespace, holder.name))
        return IdleView(
            read_at=self.now,
            idle_after_s=self.idle_after_s,
            pods=tuple(pods[:most]),
            total=IdleHolder.total(pods, self.now),
            unmeasured_nodes=tuple(self.projection.unmeasured_nodes()),
            problems=self.problems,
        )

    def waiting_pods(self) -> Iterator[WaitingView]:
        first: dict[tuple[str, str], PodUid] = {}
        for position, waiting in enumerate(self.projection.waiting_pods(), start=1):
            queued = waiting.queued
            if self.visible(queued.namespace):
                of = queued.request.gang.name if queued.request.gang else queued.pod
                alike = first.setdefault((of, shown_refusal(waiting).text), queued.pod)
                yield self._waiting(waiting, position, alike)

    def _waiting(self, waiting: WaitingPod, position: int, first_alike: PodUid) -> WaitingView:
        queued = waiting.queued
        filter_reason = waiting.refusal.reason if waiting.was_filtered_out else ""
        by_name = "schedulerName" if queued.by_kube_scheduler else ""
        return WaitingView.from_attributes(
            queued,
            shown_refusal(waiting),
            handed_over=queued.handed_over or by_name,
            scheduler_reason=waiting.scheduler_reason,
            filter_reason=filter_reason,
            priority=queued.request.priority,
            gang=queued.request.gang.name if queued.request.gang else "",
            since=waiting.waiting_since or queued.created_at,
            position=position,
            code=waiting.reason_code,
            start=self.projection.starts.get(queued.pod),
            first_alike=first_alike,
        )

    def queue(self) -> QueueView:
        shown = list(self.waiting_pods())
        total = len(self.projection.waiting) + len(self.projection.gated)
        return QueueView(
            total=total,
            hidden=total - len(shown),
            by_code=dict(Counter(pod.code for pod in shown)),
            pods=tuple(shown[:MAX_WAITING]),
        )

    def pod(self, uid: PodUid, trace: TraceView) -> PodView | None:
        """Return None if no lease, waiting pod or recent event of the pod is visible."""
        lease = self.projection.lease_of(uid)
        waiting = self.projection.waiting.get(uid) or self.projection.gated.get(uid)
        latest = self.projection.events.latest_of(uid)
        subject = lease or (waiting.queued if waiting else latest)
        if subject is None or not self.visible(subject.namespace):
            return None
        return PodView(
            read_at=self.now,
            pod=uid,
            namespace=subject.namespace,
            name=subject.name,
            lease=self.lease(lease) if lease else None,
            waiting=self._waiting_details(waiting) if waiting else None,
            gang=self._gang(_gang_name(lease, waiting), subject.namespace),
            cordoned=visible_reason(self.projection.nodes[lease.node].cordoned, self.visible)
            if lease
            else "",
            devices=tuple(self._devices_of(lease)) if lease else (),
            processes=tuple(self.projection.processes_of(lease)) if lease else (),
            trace=trace,
            problems=self.problems,
        )

    def _devices_of(self, lease: Lease) -> Iterator[DeviceView]:
        for uuid in dict.fromkeys(share.device for share in lease.shares):
            view = self.projection.devices.get(uuid)
            if view is not None:
                yield structs.replace(self.device(view), shares=())

    def _waiting_details(self, waiting: WaitingPod) -> WaitingDetails:
        queue = self.projection.waiting_pods()
        refusal = waiting.refusal
        position = 1 + [waiting_pod.queued.pod for waiting_pod in queue].index(waiting.queued.pod)
        return WaitingDetails.from_attributes(
            self._waiting(waiting, position, waiting.queued.pod),
            counts=tuple(ReasonCount(reason=why, nodes=nodes) for why, nodes in refusal.counts),
            nearest=refusal.nearest_nodes,
            quota=Namespace(refusal.quota),
            queue=self._queue_place(queue, position, self.projection.fair_share()),
        )

    def _queue_place(
        self, queue: Sequence[WaitingPod], position: int, fair_share: FairShare
    ) -> QueuePlace:
        queued = queue[position - 1].queued
        entitlement = fair_share.entitlement_of(queued.namespace)
        place = QueuePlace(
            position=position,
            of=len(queue),
            dominant_share=round(fair_share.dominant_share(queued.namespace), 6),
            weighted_share=round(fair_share.weighted_dominant_share(queued.namespace), 6),
            weight=entitlement.weight,
            has_budget=entitlement.has_budget,
        )
        before = queue[position - 2].queued if position > 1 else None
        if before is None or not self.visible(before.namespace):
            return place
        return structs.replace(
            place,
            after=f"{before.namespace}/{before.name}",
            after_reason=precedence_reason(before, queued, fair_share),
        )

    def _gang(self, name: str, namespace: Namespace) -> GangView | None:
        if not name or not self.visible(namespace):
            return None
        waiting = [
            (member.queued.name, gang.min_member)
            for member in self.projection.waiting.values()
            if (gang := member.queued.request.gang) and gang.name == name
        ]
        totals = self.projection.totals.values()
        leases = (lease for node in totals for lease in node.leases)
        return GangView(
            name=name,
            min_member=max((min_member for _, min_member in waiting), default=None),
            holding=tuple(sorted(lease.name for lease in leases if lease.gang == name)),
            waiting=tuple(sorted(pod for pod, _ in waiting)),
        )

    # Namespaces and events

    def namespaces(self) -> tuple[NamespaceView, ...]:
        return tuple(view for view in self.projection.namespaces() if self.visible(view.namespace))

    def events(self, *, after: int = 0) -> tuple[EventView, ...]:
        return tuple(
            self._event(event)
            for event in self.projection.events.latest
            if event.number > after and self._is_visible(event)
        )

    def _is_visible(self, event: EventView) -> bool:
        """A problem is visible to all viewers, unless it names a pod of a hidden namespace."""
        if event.kind in {PROBLEM, SOLVED}:
            return bool(visible_fault(event.text, self.visible))
        return self.visible(event.namespace)

    def _event(self, event: EventView) -> EventView:
        is_shown = not event.beneficiary or self.visible(event.for_namespace)
        return event if is_shown else structs.replace(event, beneficiary="")


def _any_unused(shares: Iterable[HeldShare]) -> bool:
    return any(
        share.measured is not None and share.measured.idle_since is not None for share in shares
    )


def _any_idle(shares: Iterable[HeldShare]) -> bool:
    return any(share.measured is not None and share.measured.idle for share in shares)


def _present(
    names: Iterable[str], values: Mapping[Any, T]
) -> tuple[tuple[T, ...], tuple[str, ...]]:
    pairs = [(name, values.get(name)) for name in names]
    return (
        tuple(value for _, value in pairs if value is not None),
        tuple(name for name, value in pairs if value is None),
    )


def _gang_name(lease: Lease | None, waiting: WaitingPod | None) -> str:
    if lease is not None and lease.gang:
        return lease.gang
    return waiting.queued.request.gang.name if waiting and waiting.queued.request.gang else ""


def preemptions_view(state: PreemptionState, visible: NamespaceFilter) -> PreemptionsView:
    in_progress = (_preemption(stored.preemption, visible) for stored in state.open)
    return PreemptionsView(
        in_progress=tuple(
            preemption for preemption in in_progress if preemption.victims or preemption.beneficiary
        ),
        evictions=tuple(
            _eviction(eviction, visible)
            for eviction in state.evictions
            if visible(eviction.namespace)
        ),
    )


def _preemption(preemption: Preemption, visible: NamespaceFilter) -> PreemptionView:
    namespace = preemption.preemptor_namespace
    return PreemptionView.from_attributes(
        preemption,
        beneficiary=_name_of(namespace, preemption.preemptor_name, visible),
        evict_at=preemption.evict_at or None,
        victims=tuple(
            VictimView(pod=f"{victim.namespace}/{victim.name}", outcome=victim.outcome)
            for victim in preemption.victims
            if visible(victim.namespace)
        ),
    )


def _eviction(record: EvictionRecord, visible: NamespaceFilter) -> EvictionView:
    return EvictionView.from_attributes(
        record,
        pod=f"{record.namespace}/{record.name}",
        uid=record.pod,
        beneficiary=_name_of(record.for_namespace, record.for_name, visible),
    )


def _name_of(namespace: str, name: str, visible: NamespaceFilter) -> str:
    return f"{namespace}/{name}" if namespace and visible(Namespace(namespace)) else ""
