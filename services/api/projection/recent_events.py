"""Recent events: steps of pods, with the time since the previous step, and problems; pure.

Each kind of subject has room of its own: a busy agent leaves the events of others.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import compress, pairwise
from operator import attrgetter, itemgetter

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
MAX_WAITING = 100
"""Events that a pod waits, of those of pods."""
MAX_EVENTS_OF_AGENT = 20
MAX_OTHERS = 100
"""Of problems and budgets."""
MAX_EVENTS_OF_OBJECT = 10
"""Of an object or namespace."""
MAX_PODS = 20_000

ProblemKey = tuple[str, str]
"""The object, such as `GPU 3 of node-0`, and the cause."""
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
WAITING = STEPS[PlacementRefused][0]
PROBLEM = "problem"
SOLVED = "solved"
BUDGET = "budget"
TRACED_STEPS = frozenset({"queued", "waiting", "placed", "bound", "running", "terminated"})


class RecentEvents:
    def __init__(self, lease_of: Callable[[PodUid], Lease | None]) -> None:
        self._of_pods: deque[EventView] = deque(maxlen=MAX_EVENTS)
        self._of_others: deque[EventView] = deque(maxlen=MAX_OTHERS)
        self._seen: frozenset[ProblemKey] = frozenset()
        self._begun: dict[ProblemKey, float] = {}
        self._lease_of = lease_of
        self._leases: OrderedDict[PodUid, Lease] = OrderedDict()
        self._waits_for: OrderedDict[PodUid, str] = OrderedDict()
        self._steps: OrderedDict[PodUid, dict[str, float]] = OrderedDict()
        self._number = 0
        self._evictions: frozenset[tuple[str, PodUid, float]] = frozenset()

    @property
    def latest(self) -> list[EventView]:
        return sorted((*self._of_pods, *self._of_others), key=attrgetter("number"))

    def add(self, events: Sequence[PodEvent], now: float) -> bool:
        """Return whether any event was new."""
        before = self._number
        for event in events:
            self._add(event, now)
        return self._number > before

    def times_of(self, pod: PodUid) -> Mapping[str, float]:
        return self._steps.get(pod, {})

    def _add(self, event: PodEvent, now: float) -> None:
        if isinstance(event, PodQueued) and event.requeue_number:
            return
        kind, follows = STEPS[type(event)]
        pod, namespace, name, node = self._pod_of(event)
        steps = self._steps_of(pod) if pod else {}
        if pod and kind != WAITING:
            self._waits_for.pop(pod, None)
        if kind in ONCE_PER_POD and kind in steps:
            return
        if isinstance(event, PlacementRefused) and self._waits_already(event):
            return
        since = steps.get(follows)
        steps[kind] = now
        self._number += 1
        if isinstance(event, AgentEvent):
            of_agent = [it for it in self._of_pods if it.node == node and it.kind in AGENT_STEPS]
            _make_room(self._of_pods, of_agent, MAX_EVENTS_OF_AGENT)
        if kind == WAITING:
            waiting = [it for it in self._of_pods if it.kind == kind]
            _make_room(self._of_pods, waiting, MAX_WAITING)
        self._of_pods.append(
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

    def _waits_already(self, event: PlacementRefused) -> bool:
        """Return whether a pod has waited for the same reason before.

        A refusal's numbers change with each retry, the reason that excludes most nodes does not.
        """
        refusal = event.refusal
        reason = refusal.counts[0][0] if refusal.counts else refusal.reason
        before = self._waits_for.pop(event.pod, None)
        self._waits_for[event.pod] = reason
        while len(self._waits_for) > MAX_PODS:
            self._waits_for.popitem(last=False)
        return before == reason

    def add_problems(self, problems: Collection[ProblemKey], now: float) -> bool:
        """Replace the problems; return whether one has begun or ended.

        A problem begins when it is seen a second time: components may still be about to report to
        an API that has just started.
        """
        before = self._number
        current = frozenset(problems)
        for key in sorted(self._begun.keys() - current):
            self._add_problem(SOLVED, key, now, began_at=self._begun.pop(key))
        for key in sorted((current & self._seen) - self._begun.keys()):
            self._add_problem(PROBLEM, key, now)
            self._begun[key] = now
        self._seen = current
        return self._number > before

    def _add_problem(
        self, kind: str, key: ProblemKey, now: float, began_at: float | None = None
    ) -> None:
        name, cause = key
        subject = Namespace(""), name
        lasted_s = None if began_at is None else max(now - began_at, 0.0)
        self._add_other(kind, subject, cause, now, lasted_s)

    def add_budget_state(self, namespace: Namespace, state: str, at: float) -> None:
        self._add_other(BUDGET, (namespace, ""), state, at)

    def _add_other(
        self,
        kind: str,
        subject: tuple[Namespace, str],
        text: str,
        at: float,
        latency_s: float | None = None,
    ) -> None:
        alike = [it for it in self._of_others if (it.namespace, it.name) == subject]
        _make_room(self._of_others, alike, MAX_EVENTS_OF_OBJECT)
        self._number += 1
        self._of_others.append(
            EventView(
                number=self._number,
                at=at,
                kind=kind,
                namespace=subject[0],
                name=subject[1],
                pod=None,
                node="",
                text=text,
                latency_s=latency_s,
            )
        )

    def add_evictions(self, journal: Sequence[EvictionRecord]) -> bool:
        evictions = self._evictions
        before = self._number
        self._evictions = frozenset(
            (record.preemption, record.pod, record.at) for record in journal
        )
        for record in journal:
            if (record.preemption, record.pod, record.at) in evictions:
                continue
            self._number += 1
            self._of_pods.append(
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
        """Return a phase, `deleted`, or why it was evicted."""
        latest = (event for event in reversed(self.latest) if event.pod == pod)
        kinds = {event.kind: event.text for event in latest}
        if EVICTIONS[EvictionOutcome.EVICTED] in kinds:
            return f"evicted: {kinds[EVICTIONS[EvictionOutcome.EVICTED]]}"
        phase = kinds.get(STEPS[PodTerminated][0])
        return "" if phase is None else phase if phase in TERMINAL else "deleted"

    def _pod_of(self, event: PodEvent) -> tuple[PodUid | None, Namespace, str, str]:
        """Return no pod if a node reports one that has no lease there."""
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


def _make_room(events: deque[EventView], alike: Sequence[EventView], most: int) -> None:
    if len(alike) >= most:
        events.remove(alike[0])


def pod_of(event: PodEvent) -> tuple[PodUid | None, Namespace, str, str]:
    """Return UID, namespace, name and node."""
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
            by = f", by {event.actor}" if event.actor else ""
            return f"{event.container}: {', '.join(compress(amounts, changes))}{by}"
        case PodTerminated():
            return event.phase
        case _:
            return ""
