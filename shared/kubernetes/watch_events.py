"""Decodes a watch: bytes into lines, and lines into typed events; pure."""

from typing import Generic, Protocol, TypeVar

import msgspec

from shared.kubernetes.errors import Status
from shared.kubernetes.types import ObjectMeta
from shared.model.errors import UNDECODABLE, UnavailableError

LINE_LIMIT_BYTES = 8 << 20


class KubernetesObject(Protocol):
    @property
    def metadata(self) -> ObjectMeta: ...


R = TypeVar("R", bound=KubernetesObject)


class WatchEvent(msgspec.Struct, Generic[R], frozen=True, gc=False):
    item: R = msgspec.field(name="object")
    kind: str = msgspec.field(name="type", default="")


class Bookmark(msgspec.Struct, frozen=True):
    """A bookmark of pods has no containers, so it is never decoded as a Pod."""

    resource_version: str


class ObjectIdentity(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""


class UndecodableObject(msgspec.Struct, frozen=True):
    """`kind` as in WatchEvent."""

    kind: str
    item: ObjectIdentity
    why: str


class UnreadableLineError(UnavailableError):
    """A new list is necessary."""


class LineSplitter:
    r"""An incomplete last line is buffered.

    >>> lines = LineSplitter()
    >>> lines.feed(b'{"type":"ADDED"}\n{"ty'), lines.feed(b'pe":"DELETED"}\n')
    ([b'{"type":"ADDED"}'], [b'{"type":"DELETED"}'])
    """

    def __init__(self, *, limit_bytes: int = LINE_LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._held: list[bytes] = []
        self._held_bytes = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """Raises UnreadableLineError above the size limit."""
        first, *others = chunk.split(b"\n")
        self._held.append(first)
        self._held_bytes += len(first)
        if self._held_bytes > self._limit_bytes:
            raise UnreadableLineError(f"a line of a watch is longer than {self._limit_bytes} bytes")
        if not others:
            return []
        lines = [b"".join(self._held), *others]
        last = lines.pop()
        self._held = [last]
        self._held_bytes = len(last)
        return [line for line in lines if line]


class _IdentifiedObject(msgspec.Struct, frozen=True):
    metadata: ObjectIdentity = ObjectIdentity()


class _IdentifiedEvent(msgspec.Struct, frozen=True):
    item: _IdentifiedObject = msgspec.field(name="object")
    kind: str = msgspec.field(name="type", default="")


class _ErrorEvent(msgspec.Struct, frozen=True):
    item: Status = msgspec.field(name="object", default=Status())


class EventReader(Generic[R]):
    def __init__(self, kind: type[R]) -> None:
        self._events = msgspec.json.Decoder(WatchEvent[kind])  # type: ignore[valid-type]
        self._items = msgspec.json.Decoder(kind)

    def read_event(self, line: bytes) -> WatchEvent[R] | Bookmark | UndecodableObject | Status:
        """A Status ends the watch with an error."""
        try:
            event: WatchEvent[R] = self._events.decode(line)
        except msgspec.ValidationError as error:
            return self._read_loosely(line, str(error))
        except UNDECODABLE as error:
            raise UnreadableLineError(f"a line of a watch is not JSON: {error}") from error
        if event.kind == "BOOKMARK":
            return Bookmark(event.item.metadata.resource_version)
        return _read_status(line) if event.kind == "ERROR" else event

    def read_item(self, item: msgspec.Raw) -> R | UndecodableObject:
        try:
            return self._items.decode(item)
        except UNDECODABLE as error:
            try:
                named = _decode(item, _IdentifiedObject).metadata
            except UnreadableLineError:
                named = ObjectIdentity()
            return UndecodableObject("LISTED", named, str(error))

    def _read_loosely(self, line: bytes, why: str) -> Bookmark | UndecodableObject | Status:
        event = _decode(line, _IdentifiedEvent)
        if event.kind == "BOOKMARK":
            return Bookmark(event.item.metadata.resource_version)
        if event.kind == "ERROR":
            return _read_status(line)
        return UndecodableObject(event.kind, event.item.metadata, why)


def _read_status(line: bytes) -> Status:
    return _decode(line, _ErrorEvent).item


S = TypeVar("S")


def _decode(data: bytes | msgspec.Raw, kind: type[S]) -> S:
    try:
        return msgspec.json.decode(data, type=kind)
    except UNDECODABLE as error:
        raise UnreadableLineError(f"an object without readable metadata: {error}") from error
