"""The clock of the Redis server: every host reads the same time, whatever its own clock shows."""

import time

from shared.model.clock import SystemClock
from shared.model.errors import UnavailableError

READ_EVERY_S = 10.0
"""How often the server's time is read; between two readings the host counts monotonic seconds."""


class LedgerClock(SystemClock):
    """Times that are stored in the ledger, or compared with stored ones, are read from it."""

    def __init__(self) -> None:
        self._ahead_s: float | None = None
        """The server's Unix time less our monotonic seconds."""
        self._read_at = -READ_EVERY_S

    @property
    def is_due(self) -> bool:
        """Whether the server's time must be read again."""
        return self._ahead_s is None or time.monotonic() >= self._read_at + READ_EVERY_S

    def set(self, server_s: float, began_s: float) -> None:
        """Set the clock by the server's time, requested at our monotonic second `began_s`."""
        self._read_at = time.monotonic()
        self._ahead_s = server_s - (began_s + self._read_at) / 2

    def now(self) -> float:
        """Return the server's Unix seconds. Raises UnavailableError until it has replied once."""
        if self._ahead_s is None:
            raise UnavailableError("the time of the Redis server is not known yet")
        return time.monotonic() + self._ahead_s
