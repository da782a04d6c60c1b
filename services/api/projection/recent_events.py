"""Recent events: one per step of a pod, with the time since the previous step; pure."""

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import compress, pairwise
from operator import itemgetter

from services.api.projection.page_views import EventView
from shared.model.events.event import Event
from shared.model.events.node_events import ShareActivated, ShareRefused, ViolationFound
from shared.model.events.pod_events import (
    BindingFailed,
    LeaseResized,
    PlacementChosen,
    PlacementRefused,
    PodBound,
    PodQueued,
    PodRejected,
    PodTerminated,
)
from shared.model.leases.lease import Lease
from shared.model.leases.preemption import EvictionOutcome, EvictionRecord, PreemptionCause
from shared.model.names import Namespace, PodUid
from shared.model.views.pods import SpanView

MAX_EVENTS = 200
MAX_EVENTS_OF_AGENT = 20
MAX_PODS = 20_000

AgentEvent = ShareActivated | ShareRefused | ViolationFound
PodEvent = (
    PodQueued
    | PodRejected
    | PodTerminated
    | PlacementChosen
    | PlacementRefused
    | PodBound
    | BindingFailed
    | LeaseResized
    | AgentEvent
)

STEPS: Mapping[type[Event], tuple[str, str]] = {
    PodQueued: ("queued", ""),
    PlacementChosen: ("placed", "queued"),
    PodBound: ("bound", "placed"),
    ShareActivated: ("running", "bound"),
    PlacementRefused: ("waiting", "queued"),
    PodRejected: ("rejected", ""),
    BindingFailed: ("binding failed", "placed"),
    LeaseResized: ("resized", ""),
    ShareRefused: ("share refused", "bound"),
    ViolationFound: ("violation", ""),
    PodTerminated: ("terminated", ""),
}
"""The name of each event's step, and the step before it."""
AGENT_STEPS = frozenset(STEPS[kind][0] for kind in (ShareActivated, ShareRefused, ViolationFound))
EVICTIONS = {
    EvictionOutcome.EVICTED: "evicted",
    EvictionOutcome.GONE: "eviction unnecessary",
    EvictionOutcome.BLOCKED: "eviction blocked",
}
CAUSES = {
    PreemptionCause.EXPIRED: "its namespace has overdrawn its budget",
    PreemptionCause.RECLAIMABLE: "the budget of its namespace is exhausted",
    PreemptionCause.PRIORITY: "a pod of higher priority needs its devices",
    PreemptionCause.POLICY: "the exhausted budget of its namespace evicts running pods",
    PreemptionCause.VIOLATION: "it violates its limits",
}
TERMINAL = ("Succeeded", "Failed")
ONCE_PER_POD = frozenset({"queued", "placed", "bound", "running", "terminated"})
"""Repetitions are ignored."""
TRACED_STEPS = frozenset({"queued", "waiting", "placed", "bound", "running", "terminated"})


class RecentEvents:
    """Oldest first."""

    def __init__(self, lease_of: Callable[[PodUid], Lease | None]) -> None:
        self.latest: deque[EventView] = deque(maxlen=MAX_EVENTS)
        self._lease_of = lease_of
        self._leases: OrderedDict[PodUid, Lease] = OrderedDict()
        """The latest leases that binders and placers published."""
        self._steps: OrderedDict[PodUid, dict[str, float]] = OrderedDict()
        self._number = 0
        self._evictions: frozenset[tuple[str, PodUid, float]] = frozenset()

    def add(self, events: Sequence[PodEvent], now: float) -> bool:
        """Return whether any event was new."""
        before = self._number
        for event in events:
            self._add(event, now)
        return self._number > before

    def times_of(self, pod: PodUid) -> Mapping[str, float]:
        """Return when each step of a pod was observed, by the step's name."""
        return self._steps.get(pod, {})

    def _add(self, event: PodEvent, now: float) -> None:
        if isinstance(event, PodQueued) and event.requeue_number:
            return
        kind, follows = STEPS[type(event)]
        pod, namespace, name, node = self._pod_of(event)
        steps = self._steps_of(pod) if pod else {}
        if kind in ONCE_PER_POD and kind in steps:
            return
        since = steps.get(follows)
        steps[kind] = now
        self._number += 1
        if isinstance(event, AgentEvent):
            self._make_room(event.node)
        self.latest.append(
            EventView(
                number=self._number,
                at=now,
                kind=kind,
                namespace=namespace,
                name=name,
                pod=pod,
                node=node,
                text=_text(event),
                latency_s=None if since is None else max(now - since, 0.0),
            )
        )

    def _make_room(self, node: str) -> None:
        """Forget the oldest event that a node's agent has reported, if there are many."""
        of_agent = [step for step in self.latest if step.node == node and step.kind in AGENT_STEPS]
        if len(of_agent) >= MAX_EVENTS_OF_AGENT:
            self.latest.remove(of_agent[0])

    def add_evictions(self, journal: Sequence[EvictionRecord]) -> bool:
        """Add the evictions that the previous reading of the journal did not have."""
        evictions = self._evictions
        before = self._number
        self._evictions = frozenset(
            (record.preemption, record.pod, record.at) for record in journal
        )
        for record in journal:
            if (record.preemption, record.pod, record.at) in evictions:
                continue
            self._number += 1
            self.latest.append(
                EventView.from_attributes(
                    record,
                    number=self._number,
                    kind=EVICTIONS[record.outcome],
                    text=CAUSES[record.cause],
                    latency_s=None,
                    beneficiary=f"{record.for_namespace}/{record.for_name}"
                    if record.for_name
                    else "",
                )
            )
        return self._number > before

    def spans_of(self, pod: PodUid) -> tuple[SpanView, ...]:
        """Return the time until each step of a pod that was observed as a span."""
        steps = sorted(self.times_of(pod).items(), key=itemgetter(1))
        traced = [(kind, at) for kind, at in steps if kind in TRACED_STEPS]
        return tuple(
            SpanView(
                span=kind,
                name=f"until {kind}",
                start_s=before - traced[0][1],
                duration_s=at - before,
            )
            for (_, before), (kind, at) in pairwise(traced)
        )

    def latest_of(self, pod: PodUid) -> EventView | None:
        return next((event for event in reversed(self.latest) if event.pod == pod), None)

    def end_of(self, pod: PodUid) -> str:
        """Return why a pod ended: its phase, that it was deleted, or why it was evicted."""
        latest = (event for event in reversed(self.latest) if event.pod == pod)
        kinds = {event.kind: event.text for event in latest}
        if EVICTIONS[EvictionOutcome.EVICTED] in kinds:
            return f"evicted: {kinds[EVICTIONS[EvictionOutcome.EVICTED]]}"
        phase = kinds.get(STEPS[PodTerminated][0])
        return "" if phase is None else phase if phase in TERMINAL else "deleted"

    def _pod_of(self, event: PodEvent) -> tuple[PodUid | None, Namespace, str, str]:
        """Return the pod and the node; no pod if a node speaks of one that has no lease there."""
        described = pod_of(event)
        if isinstance(event, PlacementChosen | PodBound | LeaseResized):
            self._leases[event.lease.pod] = event.lease
            if len(self._leases) > MAX_PODS:
                self._leases.popitem(last=False)
        if isinstance(event, AgentEvent) and described[0]:
            lease = self._leases.get(described[0]) or self._lease_of(described[0])
            if lease is None or (lease.namespace, lease.name, lease.node) != described[1:]:
                return None, Namespace(""), "", event.node
        return described

    def _steps_of(self, pod: PodUid) -> dict[str, float]:
        steps = self._steps.setdefault(pod, {})
        self._steps.move_to_end(pod)
        while len(self._steps) > MAX_PODS:
            self._steps.popitem(last=False)
        return steps


def pod_of(event: PodEvent) -> tuple[PodUid | None, Namespace, str, str]:
    """Return UID, namespace, name and node of the pod that an event is about."""
    match event:
        case PlacementChosen(lease=lease) | PodBound(lease=lease) | LeaseResized(lease=lease):
            return lease.pod, lease.namespace, lease.name, lease.node
        case ShareActivated(allocation=allocation):
            return allocation.pod, allocation.namespace, allocation.name, event.node
        case ShareRefused() | ViolationFound():
            return event.pod, event.namespace or Namespace(""), event.name, event.node
        case PodTerminated():
            return event.pod, event.namespace, event.name, event.node or ""
        case _:
            return event.pod, event.namespace, event.name, ""


def _text(event: PodEvent) -> str:
    match event:
        case PlacementRefused():
            return event.refusal.reason
        case PodRejected() | BindingFailed() | ShareRefused():
            return event.reason
        case ViolationFound():
            return event.message
        case LeaseResized(before=before, after=after):
            amounts = (
                f"{before.memory_mib} to {after.memory_mib} MiB",
                " to ".join(
                    f"{size.cores_percent} %" if size.cores_percent else "no limit"
                    for size in (before, after)
                )
                + " of the cores",
            )
            changes = (
                before.memory_mib != after.memory_mib,
                before.cores_percent != after.cores_percent,
            )
            return f"{event.container}: {', '.join(compress(amounts, changes))}"
        case PodTerminated():
            return event.phase
        case _:
            return ""
