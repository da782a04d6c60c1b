"""How many objects of a kind are kept, of a namespace and in all; pure."""

from collections import Counter
from typing import Any

import msgspec

PLAIN_BYTES = 256
"""As MessagePack. An object of several times as much counts as several."""
_encode = msgspec.msgpack.Encoder().encode


class Room:
    """A namespace with many or large objects leaves out its own, and none of others."""

    def __init__(self, kind: str, *, most: int, most_of_namespace: int) -> None:
        self.kind = kind
        self.text = (
            f"the watcher keeps at most {most} {kind}, and {most_of_namespace} of a namespace, "
            "large ones count as several: delete those that are not needed, and restart it"
        )
        self.left_out: set[str] = set()
        """Namespaces of which not all objects are kept."""
        self._most = most
        self._most_of_namespace = most_of_namespace
        self._in_all = 0
        self._of_namespace = Counter[str]()
        self._unreported: set[str] = set()

    def admits(self, namespace: str, stored: Any) -> bool:
        """Count an object if there is room; those without a namespace have that of all."""
        size = _size(stored)
        has_room = self._in_all + size <= self._most
        if namespace:
            has_room &= self._of_namespace[namespace] + size <= self._most_of_namespace
        if has_room:
            self._count(namespace, size)
        elif namespace not in self.left_out:
            self.left_out.add(namespace)
            self._unreported.add(namespace)
        return has_room

    def release(self, namespace: str, stored: Any) -> None:
        self._count(namespace, -_size(stored))

    def take_unreported(self) -> list[str]:
        """Return lines for a log, about the namespaces that were left out since the last call."""
        namespaces = sorted(self._unreported)
        self._unreported.clear()
        return [
            f"not all {self.kind}{f' of namespace {name}' if name else ''} are kept: {self.text}"
            for name in namespaces
        ]

    def _count(self, namespace: str, more: int) -> None:
        self._in_all += more
        self._of_namespace[namespace] += more
        if not self._of_namespace[namespace]:
            del self._of_namespace[namespace]


def _size(stored: Any) -> int:
    try:
        size = len(_encode(stored))
    except OverflowError:  # a quantity of more than 64 bits
        size = len(repr(stored))
    return max(1, size // PLAIN_BYTES)
