"""Splits a list of objects into its items as its bytes arrive; pure."""

import re
from collections.abc import Iterator

from shared.kubernetes.errors import UnexpectedResponseError
from shared.model.errors import UnavailableError

MOST_ITEM_BYTES = 32 << 20
"""JSON is several times as long as the 1.5 MB that the API server stores."""
_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_PLAIN = rb'[^"{}\[\]]++|' + _STRING
_INNER = re.compile(rb"(?:" + _PLAIN + rb"|\{(?:" + _PLAIN + rb")*+\})*+", re.DOTALL)
"""Up to the next bracket that matters: objects without inner ones are passed over."""
_START = re.compile(rb'"items"\s*:\s*\[')
_NEXT = re.compile(rb"[\s,]*+(.)", re.DOTALL)
_OPENING = b"{["
_QUOTE = ord('"')


class ListItems:
    """An incomplete item is looked at again once there are twice as many bytes."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._started = False
        self._complete = False
        self._look_at = 0

    def add(self, part: bytes) -> Iterator[bytes]:
        """Yield the items that are complete now.

        Raises UnexpectedResponseError if an item is too large, or is no object.
        """
        self._buffer += part
        if len(self._buffer) >= self._look_at:
            yield from self._split()
            self._look_at = 2 * len(self._buffer)

    def end(self) -> Iterator[bytes]:
        """Yield what is left. Raises UnavailableError if the list is incomplete."""
        yield from self._split()
        if self._started and not self._complete:
            raise UnavailableError("a response is not JSON: it ends within its list of items")

    @property
    def rest(self) -> bytes:
        """A response without items; empty if there are some."""
        return b"" if self._started else bytes(self._buffer)

    def _split(self) -> Iterator[bytes]:
        at = 0
        if not self._started and (start := _START.search(self._buffer)):
            self._started = True
            at = start.end()
        while self._started and not self._complete and (item := _NEXT.match(self._buffer, at)):
            first = item[1]
            self._complete = first == b"]"
            if self._complete:
                break
            if first != b"{":
                raise UnexpectedResponseError(
                    "a response has a list with an item that is no object"
                )
            end = _end_of_object(self._buffer, item.start(1))
            if end is None:
                break
            yield bytes(self._buffer[item.start(1) : end])
            at = end
        del self._buffer[:at]
        if self._complete:
            self._buffer.clear()
        elif len(self._buffer) > MOST_ITEM_BYTES:
            raise UnexpectedResponseError(
                f"a response has a list with an item of more than {MOST_ITEM_BYTES >> 20} MiB"
            )


def _end_of_object(buffer: bytearray, start: int) -> int | None:
    """Return None if it is incomplete."""
    depth = 1
    at = start + 1
    while inner := _INNER.match(buffer, at):
        at = inner.end() + 1
        if at > len(buffer) or buffer[at - 1] == _QUOTE:
            return None
        depth += 1 if buffer[at - 1] in _OPENING else -1
        if depth == 0:
            return at
    return None
