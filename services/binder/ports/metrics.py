"""What the binder counts beside its messages; an adapter turns it into metrics."""

from typing import Protocol


class Tally(Protocol):
    """Counters by name."""

    def count(self, kind: str, by: int = 1) -> None:
        """Add to the counter called `kind`."""
        ...
