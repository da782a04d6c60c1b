"""Messages with one field at an extreme, for every field of an event."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from shared.model.events.event import Event
from shared.nats.wire import FORMAT

LONG = 70_000
TEXTS = ("", "x" * LONG, "a\nb\x00\u202e/../é", "node-1")
NUMBERS = (-1, 0, 2**31, 2**53, 2**63, 2**64 - 1, -(2**63))
FLOATS = (-1.0, math.nan, math.inf, 1e300)


def extremes(event: Event, renamed: Mapping[str, str]) -> Iterator[bytes]:
    """Yield the event with names replaced, and then with each field at each extreme of its kind."""
    whole = _renamed(_plain(event), renamed)
    yield encoded(whole)
    for changed in _changed(whole):
        try:
            yield encoded(changed)
        except OverflowError:
            continue


def encoded(*events: object) -> bytes:
    return msgspec.msgpack.encode({"v": FORMAT, "events": events})


def _plain(value: Any) -> Any:
    """Return a value as maps and lists of all its fields."""
    if dataclasses.is_dataclass(value):
        return {
            field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list | set | frozenset):
        return [_plain(item) for item in value]
    return value


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    match value:
        case str():
            return names.get(value, value)
        case dict():
            return {names.get(key, key): _renamed(item, names) for key, item in value.items()}
        case list():
            return [_renamed(item, names) for item in value]
    return value


def _changed(value: Any) -> Iterator[Any]:
    match value:
        case bool():
            yield from (not value, 2)
        case int():
            yield from NUMBERS
        case float():
            yield from FLOATS
        case str():
            yield from TEXTS
        case None:
            yield from ("", 0)
        case dict():
            yield from _changed_map(value)
        case list():
            yield from _changed_list(value)


def _changed_map(value: Mapping[str, Any]) -> Iterator[Any]:
    yield {}
    yield {**value, "x" * LONG: 1}
    for key, item in value.items():
        yield {name: kept for name, kept in value.items() if name != key}
        for changed in _changed(item):
            yield {**value, key: changed}


def _changed_list(value: Sequence[Any]) -> Iterator[Any]:
    yield []
    yield [None]
    yield [*value] * 300
    for changed in _changed(value[0]) if value else ():
        yield [changed, *value[1:]]
