"""What planner and binder publish for each other: decisions about starts, and violations; pure."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from shared.model.bounds import MessageText, Seconds, ShortText
from shared.model.events.event import Delivery, Event, PodEvent
from shared.model.events.node_events import ViolationFound
from shared.model.names import NodeName


class StartDecision(StrEnum):
    PLANNED = "planned"
    WITHDRAWN = "withdrawn"
    UNKNOWN = "unknown"
    """No end of what it waits for is in sight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlansChanged(Event, subject="plans.changed.v1"):
    """The next step of a plan may be due.

    If it is lost, binders look at the plans half a second later.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReported(PodEvent, subject="start.reported.v1", delivery=Delivery.WORK):
    """The binder shows the decision in an Event and in the pod's condition."""

    decision: StartDecision
    text: MessageText = ""
    once: bool = False
    """An equal Event is not counted up."""
    opened_at: Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ViolationConfirmed(PodEvent, subject="violation.confirmed.v1", delivery=Delivery.WORK):
    node: NodeName
    reason: ShortText
    message: MessageText
    found_at: Seconds = 0.0

    @classmethod
    def of(cls, violation: ViolationFound) -> Self:
        return cls(
            pod=violation.pod,
            namespace=violation.namespace,
            name=violation.name,
            node=violation.node,
            reason=violation.reason,
            message=violation.message,
            found_at=violation.found_at,
        )
