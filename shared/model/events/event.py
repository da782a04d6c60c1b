"""The base of all events: facts that one service publishes to others.

`subject` is the name of the event on the bus, `<noun>.<participle>.v<n>`. A field with a default
may be added; any other change is a new class with a new version. Work is delivered at least once
to one replica of the service that handles it. A broadcast goes to all current subscribers and may
be lost.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar


class Delivery(StrEnum):
    """How an event travels."""

    WORK = "work"
    """JetStream work queue: stored until one replica has acknowledged it."""
    BROADCAST = "broadcast"
    """Core NATS: delivered to the subscribers that are connected now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A message on the bus."""

    subject: ClassVar[str]
    delivery: ClassVar[Delivery]

    @property
    def route(self) -> str:
        """The last token of the subject if receivers want the events of one node only: its name."""
        return ""

    @property
    def event_id(self) -> str:
        """ID for deduplication: events with the same ID are the same fact. Empty: none."""
        return ""

    @property
    def follows_wait(self) -> bool:
        """Time has passed since its cause; its spans link to the cause instead of following it."""
        return False
