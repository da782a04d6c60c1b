"""What every event is: a fact in the past tense, which one service says to others.

`subject` is the event's name on the bus, `<noun>.<participle>.v<n>`. A field with a default may be
added; anything else is a new class with a new version. Work is delivered at least once to one
replica of whoever handles it; news goes to all who listen at that moment, and may be lost.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar


class Delivery(StrEnum):
    """How an event travels."""

    WORK = "work"
    """JetStream work queue: kept until one replica has acknowledged it."""
    BROADCAST = "broadcast"
    """Core NATS: to everybody who listens now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Anything that travels on the bus."""

    subject: ClassVar[str]
    delivery: ClassVar[Delivery]

    @property
    def route(self) -> str:
        """The subject's last token where receivers want only part of the events: a node's name."""
        return ""

    @property
    def event_id(self) -> str:
        """Two events with one id are the same fact told twice; empty if telling twice is news."""
        return ""

    @property
    def follows_wait(self) -> bool:
        """Time has passed since what it follows from, which its spans then link to."""
        return False
