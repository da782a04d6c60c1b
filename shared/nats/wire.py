"""Events as MessagePack: a map with the format's version and a list of events of one type.

Every event is a map of its fields, so that a reader ignores what it does not know and a writer may
add what has a default. Written with `msgpack`, whose only door this is; read with msgspec's typed
decoder, which checks and builds the events in one pass, three times as fast as unpacking first.
"""

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import msgpack
import msgspec

from shared.model.errors import RequestError
from shared.model.events.event import Event

FORMAT = 1

E = TypeVar("E", bound=Event)


def encode(events: Sequence[Event]) -> bytes:
    """Encode events of one type as one message.

    Raises RequestError for what MessagePack has no form for: numbers beyond 64 bits, broken text.
    """
    try:
        packed: bytes = msgpack.packb({"v": FORMAT, "events": msgspec.to_builtins(list(events))})
    except (OverflowError, UnicodeEncodeError) as error:
        subject = events[0].subject
        raise RequestError(f"{len(events)} of {subject} cannot be written: {error}") from error
    return packed


def decode(data: bytes, event_type: type[E]) -> list[E]:
    """Decode one message. Raises RequestError if it is not a message of `event_type`."""
    try:
        message = _decoder(event_type).decode(data)  # type: ignore[arg-type]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RequestError(f"{len(data)} bytes are no {event_type.subject}: {error}") from error
    if message.v != FORMAT:
        raise RequestError(f"a message of {event_type.subject} has format {message.v}")
    events: list[E] = message.events
    return events


@functools.cache
def _decoder(event_type: type[Event]) -> Any:
    fields = [("v", int), ("events", list[event_type])]  # type: ignore[valid-type]
    return msgspec.msgpack.Decoder(msgspec.defstruct("Message", fields))
