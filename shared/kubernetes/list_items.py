"""Splits a list of objects into its items as its bytes arrive; pure."""

from collections.abc import Iterator

import msgspec

from shared.kubernetes.errors import UnexpectedResponseError
from shared.model.errors import UNDECODABLE

MOST_ITEM_BYTES = 32 << 20
"""JSON is several times as long as the 1.5 MB that the API server stores."""
_START = b'"items":['
_BETWEEN = b',{"metadata":'
"""As Kubernetes writes lists; one of another form is split at its end only."""


class ListItems:
    def __init__(self) -> None:
        self._buffer = bytearray()
        self._started = False
        self._looked_at = 0

    def add(self, part: bytes) -> Iterator[bytes]:
        """Yield the items that are complete now. Raises UnexpectedResponseError for a large one."""
        self._buffer += part
        if not self._started and (start := self._buffer.find(_START)) >= 0:
            self._started = True
            del self._buffer[: start + len(_START)]
        while self._started and (end := self._buffer.find(_BETWEEN, self._looked_at)) >= 0:
            self._looked_at = end + 1
            item = bytes(self._buffer[:end])
            if _is_complete(item):
                del self._buffer[: end + 1]
                self._looked_at = 0
                yield item
        self._looked_at = max(self._looked_at, len(self._buffer) - len(_BETWEEN))
        if len(self._buffer) > MOST_ITEM_BYTES:
            raise UnexpectedResponseError(
                f"a response has a list with an item of more than {MOST_ITEM_BYTES >> 20} MiB"
            )

    @property
    def rest(self) -> bytes:
        """A list of what is left."""
        return b"{" + _START + self._buffer if self._started else bytes(self._buffer)


def _is_complete(item: bytes) -> bool:
    """An object is not complete before its last byte: the text may also be between inner ones."""
    try:
        msgspec.json.decode(item, type=msgspec.Raw)
    except UNDECODABLE:
        return False
    return True
