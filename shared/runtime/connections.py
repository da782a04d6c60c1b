"""Which connections of an HTTP port stay, and which is closed for a new one; pure.

Behind kube-proxy the connections of honest clients and of others may come from the same address. So
connections that have proved nothing have at most half of the room, and a moment to do so; then idle
ones make room. A request that is being handled is never cut off.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

STALLED_S = 10.0
"""A client that takes nothing of a response for this time is gone."""
GRACE_S = 1.0
"""A connection that makes no progress for this time, and has proved nothing, makes room first."""
FLUSH_S = 1.0
"""A response that was not taken in this time no longer protects its connection."""


class Progress(IntEnum):
    """The least advanced makes room first."""

    ACCEPTED = 0
    """The TLS handshake has not ended."""
    OPEN = 1
    """No request was answered with success yet."""
    PROVEN = 2
    """The next request may be arriving."""
    BUSY = 3
    """A request that has arrived is being handled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortBounds:
    connections: int = 64
    body_bytes: int = 64 * 1024
    free_body_bytes: int = 64 * 1024
    """A larger body waits for its turn, which lasts until its request is answered."""
    larger_bodies: int = 4
    handshake_s: float = 5.0
    """Until a TLS handshake has ended."""
    first_request_s: float = 10.0
    """From the TLS handshake until a first request begins, and from there until it has arrived:
    longer than `body_s`."""
    body_s: float = 5.0
    """Until a body has arrived, and has had its turn among large ones."""
    idle_s: float = 75.0
    """Between two requests."""

    @property
    def of_address(self) -> int:
        return self.connections * 3 // 4


@dataclass(slots=True, eq=False)
class ConnectionState:
    """Times are those of the event loop."""

    address: str
    progress: Progress
    since: float
    unsent_bytes: int = 0
    unsent_since: float = 0.0

    def advance(self, progress: Progress, now: float) -> None:
        self.progress = progress
        self.since = now

    def note_unsent(self, size: int, now: float) -> None:
        if size < self.unsent_bytes or not self.unsent_bytes:
            self.unsent_since = now
        self.unsent_bytes = size

    def has_stalled(self, now: float) -> bool:
        return self.unsent_bytes > 0 and now - self.unsent_since >= STALLED_S

    def is_late(self, bounds: PortBounds, now: float) -> bool:
        return self.progress is Progress.OPEN and now - self.since >= bounds.first_request_s

    def rests(self, now: float) -> bool:
        """Return whether it has proved something, and no request or response is under way."""
        if self.progress is not Progress.PROVEN:
            return False
        return not self.unsent_bytes or now - self.since >= FLUSH_S


def to_close(connections: Iterable[ConnectionState], now: float) -> ConnectionState | None:
    """Return the connection that makes room for a new one, or None if none may."""
    everyone = [*connections]
    unproven = [connection for connection in everyone if connection.progress < Progress.PROVEN]
    slow = [connection for connection in unproven if now - connection.since >= GRACE_S]
    if not slow and len(unproven) * 2 > len(everyone):
        slow = unproven
    candidates = (
        slow or [connection for connection in everyone if connection.rests(now)] or unproven
    )
    counts = Counter(connection.address for connection in candidates)
    return max(
        candidates,
        key=lambda connection: (counts[connection.address], -connection.since),
        default=None,
    )
