"""Events as MessagePack: a map with the format version and a list of events of one type; pure.

A reader ignores fields that it does not know. Requests and leases are written without what is at
its default.
"""

import functools
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from shared.model.errors import UNDECODABLE, RequestError
from shared.model.events.event import Event

FORMAT = 1
EVENTS_PER_MESSAGE = 256
"""Messages with more are refused unread: each event that is invalid costs a log line."""
MOST_CONFIRMED = 65_536
"""Numbers of one list: a sender keeps 2048 messages of a type until they are handled."""
MAX_PAYLOAD = 4 * 2**20
"""The leases of a node are one message, however many containers its pods have."""
_Numbers = Annotated[list[int], msgspec.Meta(max_length=MOST_CONFIRMED)]
_Bound = msgspec.Meta(max_length=EVENTS_PER_MESSAGE)
_encode = msgspec.msgpack.Encoder().encode


class Confirmation(msgspec.Struct, frozen=True, kw_only=True):
    handled: _Numbers = []
    held: _Numbers = []
    """Received, and not handled yet."""
    returned: _Numbers = []


class _RawMessage(msgspec.Struct):
    v: int
    events: Annotated[list[msgspec.Raw], _Bound]


_decode_raw = msgspec.msgpack.Decoder(_RawMessage)
_decode_confirmation = msgspec.msgpack.Decoder(Confirmation).decode

E = TypeVar("E", bound=Event)


def encode(events: Sequence[Event]) -> bytes:
    """Raises RequestError for integers beyond 64 bits and text that is not valid Unicode."""
    try:
        return _encode({"v": FORMAT, "events": events})
    except (OverflowError, UnicodeEncodeError) as error:
        subject = events[0].subject
        raise RequestError(
            f"{len(events)} events of {subject} cannot be encoded: {error}"
        ) from error


def decode(data: bytes, event_type: type[E]) -> list[E]:
    """Raises RequestError if it is no message of `event_type`, or a field is out of its bounds."""
    message = _read(data, event_type, _decoder(event_type))  # type: ignore[arg-type]
    events: list[E] = message.events
    return events


def decode_each(data: bytes, event_type: type[E]) -> tuple[list[E], list[RequestError]]:
    """Return the valid events of a message, and the errors of the others."""
    try:
        return decode(data, event_type), []
    except RequestError as error:
        events = list[E]()
        errors = [error]
    try:
        message = _read(data, event_type, _decode_raw)
    except RequestError:
        return events, errors
    errors.clear()
    for raw in message.events:
        try:
            events.append(msgspec.msgpack.decode(raw, type=event_type))
        except UNDECODABLE as error:
            errors.append(RequestError(f"{len(raw)} bytes are not {event_type.subject}: {error}"))
    return events, errors


def _read(data: bytes, event_type: type[Event], decoder: Any) -> Any:
    try:
        message = decoder.decode(data)
    except UNDECODABLE as error:
        raise RequestError(f"{len(data)} bytes are not {event_type.subject}: {error}") from error
    if message.v != FORMAT:
        raise RequestError(
            f"a message of {event_type.subject} has format {message.v}, not {FORMAT}"
        )
    return message


def encode_confirmation(report: Confirmation) -> bytes:
    return _encode(report)


def decode_confirmation(data: bytes) -> Confirmation:
    """Raises RequestError."""
    try:
        return _decode_confirmation(data)
    except UNDECODABLE as error:
        raise RequestError(f"{len(data)} bytes are no confirmation of work: {error}") from error


@functools.cache
def _decoder(event_type: type[Event]) -> Any:
    events = Annotated[list[event_type], _Bound]  # type: ignore[valid-type]
    fields = [("v", int), ("events", events)]
    return msgspec.msgpack.Decoder(msgspec.defstruct("Message", fields))
