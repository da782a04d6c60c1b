"""Records that cannot be decoded: readers of many go on with the others; pure."""

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec

from shared.model.errors import UNDECODABLE

V = TypeVar("V")
T = TypeVar("T")

UNREADABLE = (
    *UNDECODABLE,
    struct.error,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
)

_SIZE = struct.Struct("<I")
_decode_lengths = msgspec.msgpack.Decoder(list[int]).decode


def readable(decode: Callable[[V], T], values: Iterable[V]) -> Iterator[T]:
    """Leave out values that cannot be decoded."""
    for value in values:
        try:
            decoded = decode(value)
        except UNREADABLE:
            continue
        yield decoded


def cut(values: bytes) -> Iterator[bytes]:
    """The lengths come first, in an array, after its size."""
    if not values:
        return
    [size] = _SIZE.unpack_from(values)
    at = _SIZE.size + size
    for length in _decode_lengths(values[_SIZE.size : at]):
        yield values[at : at + length]
        at += length
