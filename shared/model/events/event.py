"""The base of all events: facts that one service publishes to others; pure.

`subject` is `<noun>.<participle>.v<n>`. A field with a default may be added; any other change is a
new class with a new version.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from shared.model.bounds import NameText
from shared.model.names import Namespace, NodeName, PodUid

ADMISSION = "leasehold.dev/admission"
"""Pod annotation: when its admission review began and ended, in ns."""
_TRACEPARENT = re.compile(
    "(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)


class Delivery(StrEnum):
    WORK = "work"
    """Kept by its sender until one replica has handled it; delivered at least once."""
    BROADCAST = "broadcast"
    """Delivered to the subscribers that are connected now."""
    COPY = "copy"
    """For observers only: not sent while there are none."""


EVENTS: dict[str, type["Event"]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """For example, `class PodBound(PodEvent, subject="pod.bound.v1", delivery=Delivery.WORK)`."""

    subject: ClassVar[str]
    delivery: ClassVar[Delivery]
    is_of_agent: ClassVar[bool] = False
    """NATS has authenticated the node in its subject as its sender."""

    def __init_subclass__(
        cls, *, subject: str = "", delivery: Delivery | None = None, is_of_agent: bool = False
    ) -> None:
        # A dataclass with slots is made twice: the second time, the attributes are there.
        if subject:
            cls.subject = subject
            cls.delivery = delivery or Delivery.BROADCAST
            cls.is_of_agent = is_of_agent
        if "subject" in vars(cls):
            EVENTS[cls.subject] = cls

    @property
    def route(self) -> str:
        """The last token of the subject: the node, if receivers want its events only."""
        return ""

    @property
    def follows_wait(self) -> bool:
        """Its spans link to those of its cause."""
        return False

    @property
    def follows_start(self) -> bool:
        """Its spans link to those of the pod's start."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvent(Event):
    node: NodeName

    @property
    def route(self) -> str:
        return self.node


@dataclass(frozen=True, slots=True, kw_only=True)
class PodEvent(Event):
    pod: PodUid
    namespace: Namespace
    name: NameText


def is_work(kind: type[Event]) -> bool:
    return getattr(kind, "delivery", None) is Delivery.WORK


def is_traceparent(text: str) -> bool:
    return _TRACEPARENT.fullmatch(text) is not None
