"""Records that cannot be decoded: whoever reads many goes on with the others; pure."""

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec

V = TypeVar("V")
T = TypeVar("T")

UNREADABLE = (
    struct.error,
    msgspec.MsgspecError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""What decoding arbitrary bytes raises."""

_LENGTH = struct.Struct("<I")


def readable(decode: Callable[[V], T], values: Iterable[V]) -> Iterator[T]:
    """Decode values, and leave those out that cannot be decoded."""
    for value in values:
        try:
            decoded = decode(value)
        except UNREADABLE:
            continue
        yield decoded


def cut(values: bytes) -> Iterator[bytes]:
    """Cut joined values, each after its length; an incomplete last one is left out."""
    at = 0
    while at + _LENGTH.size <= len(values):
        [length] = _LENGTH.unpack_from(values, at)
        at += _LENGTH.size + length
        if at <= len(values):
            yield values[at - length : at]
