"""The ticker: one line per step of a pod, with the time since the step before, as heard here."""

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
from shared.model.names import Namespace, PodUid

LINES = 200
REMEMBERED = 20_000
"""Pods whose steps are remembered."""

News = (
    PodQueued
    | PodRejected
    | PodTerminated
    | PlacementChosen
    | PlacementRefused
    | PodBound
    | BindingFailed
    | LeaseResized
    | ShareActivated
    | ShareRefused
    | ViolationFound
)

STEPS: Mapping[type[Event], tuple[str, str]] = {
    PodQueued: ("queued", ""),
    PlacementChosen: ("placed", "queued"),
    PodBound: ("bound", "placed"),
    ShareActivated: ("running", "bound"),
    PlacementRefused: ("waits", "queued"),
    PodRejected: ("rejected", ""),
    BindingFailed: ("binding failed", "placed"),
    LeaseResized: ("resized", ""),
    ShareRefused: ("share refused", "bound"),
    ViolationFound: ("violation", ""),
    PodTerminated: ("gone", ""),
}
"""What each piece of news is called, and the step that it follows."""
ONCE = frozenset({"queued", "placed", "bound", "running", "gone"})
"""Steps that a pod takes once: a repetition is no news."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """One line."""

    number: int
    at: float
    kind: str
    namespace: Namespace
    name: str
    pod: PodUid | None = None
    node: str = ""
    text: str = ""
    latency_s: float | None = None
    """Since the step before; None: there is none, or it was not heard of."""


class Ticker:
    """The last lines, oldest first."""

    def __init__(self) -> None:
        self.lines: deque[Tick] = deque(maxlen=LINES)
        self._steps: OrderedDict[PodUid, dict[str, float]] = OrderedDict()
        self._number = 0

    def hear(self, events: Sequence[News], now: float) -> bool:
        """Add a line for each piece of news that is one; return whether any was."""
        before = self._number
        for event in events:
            self._hear(event, now)
        return self._number > before

    def _hear(self, event: News, now: float) -> None:
        if isinstance(event, PodQueued) and event.offer:
            return
        kind, follows = STEPS[type(event)]
        pod, namespace, name, node = _whose(event)
        steps = self._steps_of(pod) if pod else {}
        if kind in ONCE and kind in steps:
            return
        since = steps.get(follows)
        steps[kind] = now
        self._number += 1
        self.lines.append(
            Tick(
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

    def _steps_of(self, pod: PodUid) -> dict[str, float]:
        steps = self._steps.setdefault(pod, {})
        self._steps.move_to_end(pod)
        while len(self._steps) > REMEMBERED:
            self._steps.popitem(last=False)
        return steps


def _whose(event: News) -> tuple[PodUid | None, Namespace, str, str]:
    match event:
        case PlacementChosen(lease=lease) | PodBound(lease=lease) | LeaseResized(lease=lease):
            return lease.pod, lease.namespace, lease.name, lease.node
        case ShareActivated(allocation=told):
            return told.pod, told.namespace, told.name, event.node
        case ShareRefused() | ViolationFound():
            return event.pod, event.namespace or Namespace(""), event.name, event.node
        case PodTerminated():
            return event.pod, event.namespace, event.name, event.node or ""
        case _:
            return event.pod, event.namespace, event.name, ""


def _text(event: News) -> str:
    match event:
        case PlacementRefused():
            return event.refusal.reason
        case PodRejected() | BindingFailed() | ShareRefused():
            return event.reason
        case ViolationFound():
            return event.message
        case LeaseResized(before=was, after=now):
            return (
                f"{event.container}: {was.memory_mib} to {now.memory_mib} MiB, "
                f"{was.cores_percent or 'any'} to {now.cores_percent or 'any'} % of the cores"
            )
        case PodTerminated():
            return event.phase
        case _:
            return ""
