"""Events as MessagePack: a map with the format's version and a list of events of one type.

Every event is a map of its fields, so that a reader ignores what it does not know and a writer may
add what has a default. The only door to `msgpack`.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgpack
import msgspec

from shared.model.errors import RequestError
from shared.model.events import Event

FORMAT = 1

E = TypeVar("E", bound=Event)


def encode(events: Sequence[Event]) -> bytes:
    """Encode events of one type as one message."""
    packed: bytes = msgpack.packb({"v": FORMAT, "events": msgspec.to_builtins(list(events))})
    return packed


def decode(data: bytes, event_type: type[E]) -> list[E]:
    """Decode one message. Raises RequestError if it is not a message of `event_type`."""
    try:
        message: Any = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException) as error:
        raise RequestError(f"{len(data)} bytes are no MessagePack: {error}") from error
    if not isinstance(message, dict) or message.get("v") != FORMAT:
        raise RequestError(f"a message of {event_type.subject} is not of format {FORMAT}")
    try:
        return msgspec.convert(message.get("events"), list[event_type])  # type: ignore[valid-type]
    except msgspec.ValidationError as error:
        raise RequestError(f"a message of {event_type.subject}: {error}") from error
