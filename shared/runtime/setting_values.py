"""Which values a setting may have, and how text is parsed as one."""

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")
_LOGIN = re.compile(r"//[^/]*@")
MAX_NUMBER = 1e9
"""Of seconds, these are 31 years; sums and products of such numbers stay exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What restricts the values of a setting, besides its type."""

    one_of: tuple[str, ...] = ()
    """All values of a word, or of each word of a list; empty: any."""
    at_least: float = 0
    at_most: float = MAX_NUMBER
    address: bool = False
    """The text is HOST:PORT, or empty."""
    schemes: tuple[str, ...] = ()
    """The text is one or several URLs with these schemes, or empty; empty: any text."""


UNBOUNDED = Bounds()


def reader_of(hint: Any, bounds: Bounds = UNBOUNDED) -> Callable[[str], Any]:
    """Return the function that parses text as a value of type `hint` within the bounds.

    It raises ValueError with a text that continues `--flag 'value' `.
    """
    optional = False
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        optional = True
        hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
    if hint is bool:
        return parse_bool
    read = _reader_of_text(hint, bounds)
    return _or_none(read) if optional else read


def _reader_of_text(hint: Any, bounds: Bounds) -> Callable[[str], Any]:
    if typing.get_origin(hint) is tuple:
        return lambda text: _words(text, bounds)
    if hint in {int, float}:
        return lambda text: parse_number(text, hint, bounds)
    if isinstance(hint, type) and issubclass(hint, Enum):
        choices = dataclasses.replace(bounds, one_of=tuple(str(each.value) for each in hint))
        return lambda text: hint(_word(text, choices))
    if hint is Path:
        return _path
    return lambda text: _word(text, bounds)


def _or_none(read: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: read(text) if text else None


def _path(text: str) -> Path:
    if not text or "\0" in text:
        raise ValueError("must be a path")
    return Path(text)


def _words(text: str, bounds: Bounds) -> tuple[str, ...]:
    parts = parse_list(text)
    for part in parts:
        if bounds.one_of and part not in bounds.one_of:
            raise ValueError(
                f"must be a list, with commas, of {_alternatives(bounds.one_of)}: {part!r} is none"
            )
    return parts


def _word(text: str, bounds: Bounds) -> str:
    if bounds.one_of and text not in bounds.one_of:
        raise ValueError(f"must be {_alternatives(bounds.one_of)}")
    if bounds.address and text:
        parse_address(text)
    if bounds.schemes and text:
        _check_urls(text, bounds.schemes)
    return text


def _check_urls(text: str, schemes: Sequence[str]) -> None:
    for part in parse_list(text) or ("",):
        scheme, _, rest = part.partition("://")
        if scheme not in schemes or not rest:
            raise ValueError(f"must be {_alternatives(schemes)}, followed by ://HOST:PORT")


def without_password(text: str) -> str:
    """Return a value for a message: without the user and the password in a URL."""
    return _LOGIN.sub("//...@", text)


def parse_address(text: str) -> tuple[str, int]:
    """Parse HOST:PORT, with a port of 0 to 65535. Raises ValueError for other text."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or int(port[:6]) > 65535:
        raise ValueError("must be HOST:PORT, with a port of 0 to 65535")
    return host, int(port)


def parse_number(text: str, kind: type[int] | type[float], bounds: Bounds = UNBOUNDED) -> float:
    """Parse a finite number within the bounds, for `int` a whole one. Raises ValueError."""
    noun = "a whole number" if kind is int else "a number"
    allowed = f"must be {noun} from {bounds.at_least:g} to {bounds.at_most:g}"
    if bounds.at_most == MAX_NUMBER:
        allowed = f"must be {noun} of {bounds.at_least:g} or more"
    try:
        number = kind(text)
    except (ValueError, OverflowError):
        raise ValueError(allowed) from None
    if not math.isfinite(number):
        raise ValueError(allowed)
    if not bounds.at_least <= number <= bounds.at_most:
        excess = f", at most {MAX_NUMBER:g}" if number > MAX_NUMBER else ""
        raise ValueError(f"{allowed}{excess}")
    return number


def parse_bool(text: str) -> bool:
    """Parse a boolean in its usual spellings. Raises ValueError for others."""
    if text.lower() in TRUE:
        return True
    if text.lower() in FALSE:
        return False
    raise ValueError("must be true or false (yes or no, on or off, 1 or 0)")


def parse_list(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list; blanks and empty entries are dropped."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _alternatives(words: Sequence[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last
