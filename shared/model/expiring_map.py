"""A mapping whose keys somebody else chooses: bounded, and without what is old; pure."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class ExpiringMap(Generic[K, V]):
    """Forgets an entry `expires_s` after it was last set, and the oldest ones beyond `most`."""

    def __init__(self, ticks: Callable[[], float], *, expires_s: float, most: int) -> None:
        self._ticks = ticks
        self._expires_s = expires_s
        self._most = most
        self._entries: OrderedDict[K, tuple[float, V]] = OrderedDict()

    def set(self, key: K, value: V) -> None:
        """Set an entry, which is the newest then."""
        self._forget_expired()
        self._entries[key] = (self._ticks(), value)
        self._entries.move_to_end(key)
        if len(self._entries) > self._most:
            self._entries.popitem(last=False)

    def get(self, key: K) -> V | None:
        """Return the value of an entry, or None."""
        self._forget_expired()
        entry = self._entries.get(key)
        return None if entry is None else entry[1]

    def pop(self, key: K) -> V | None:
        """Remove an entry; return its value, or None if there is none."""
        self._forget_expired()
        entry = self._entries.pop(key, None)
        return None if entry is None else entry[1]

    def values(self) -> Iterator[V]:
        """Yield the values, oldest first."""
        self._forget_expired()
        for _, value in list(self._entries.values()):
            yield value

    def __contains__(self, key: K) -> bool:
        self._forget_expired()
        return key in self._entries

    def __len__(self) -> int:
        self._forget_expired()
        return len(self._entries)

    def _forget_expired(self) -> None:
        until = self._ticks() - self._expires_s
        while self._entries:
            key = next(iter(self._entries))
            if self._entries[key][0] > until:
                return
            del self._entries[key]
