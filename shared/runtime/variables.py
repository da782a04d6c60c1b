"""The environment variables `LEASEHOLD_...`: the values and defaults of arguments."""

import argparse
import dataclasses
import difflib
import math
import os
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shared.model.errors import RequestError

TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")
_LOGIN = re.compile(r"//[^/]*@")
MAX_NUMBER = 1e9
"""Of seconds, these are 31 years; sums and products of such numbers stay exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueBounds:
    one_of: tuple[str, ...] = ()
    """Of a word, or of each word of a list; empty for any."""
    at_least: float = 0
    at_most: float = MAX_NUMBER
    address: bool = False
    schemes: tuple[str, ...] = ()


UNBOUNDED = ValueBounds()


def reader_of(hint: Any, bounds: ValueBounds = UNBOUNDED) -> Callable[[str], Any]:
    """Its ValueError has a text that continues `--flag 'value' `."""
    optional = False
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        optional = True
        hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
    if hint is bool:
        return parse_bool
    read = _reader_of_text(hint, bounds)
    return _or_none(read) if optional else read


def _reader_of_text(hint: Any, bounds: ValueBounds) -> Callable[[str], Any]:
    if typing.get_origin(hint) is tuple:
        return lambda text: _words(text, bounds)
    if hint in {int, float}:
        return lambda text: parse_number(text, hint, bounds)
    if isinstance(hint, type) and issubclass(hint, Enum):
        choices = dataclasses.replace(bounds, one_of=tuple(str(member.value) for member in hint))
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


def _words(text: str, bounds: ValueBounds) -> tuple[str, ...]:
    parts = parse_list(text)
    for part in parts:
        if bounds.one_of and part not in bounds.one_of:
            raise ValueError(
                f"must be a list, with commas, of {_alternatives(bounds.one_of)}: {part!r} is none"
            )
    return parts


def _word(text: str, bounds: ValueBounds) -> str:
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
        if scheme not in schemes or not rest or not _is_url(part):
            raise ValueError(f"must be {_alternatives(schemes)}, followed by ://HOST:PORT")


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return _is_host(parts.hostname or "") and (parts.port is None or parts.port >= 0)
    except ValueError:
        return False


def _is_host(name: str) -> bool:
    """Resolvers raise UnicodeError for labels that are empty or too long."""
    try:
        return bool(name.encode("idna"))
    except UnicodeError:
        return False


def without_password(text: str) -> str:
    """Remove the user and the password in a URL.

    >>> without_password("redis://binder:s3cret@redis:6379/0")
    'redis://...@redis:6379/0'
    """
    return _LOGIN.sub("//...@", text)


def parse_address(text: str) -> tuple[str, int]:
    """Parse HOST:PORT, with a port of 0 to 65535. Raises ValueError for other text.

    >>> parse_address("127.0.0.1:9100")
    ('127.0.0.1', 9100)
    """
    host, _, port = text.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and int(port[:6]) <= 65535
    if not _is_host(host) or not is_port:
        raise ValueError("must be HOST:PORT, with a port of 0 to 65535")
    return host, int(port)


def parse_number(
    text: str, kind: type[int] | type[float], bounds: ValueBounds = UNBOUNDED
) -> float:
    """Parse a finite number within the bounds. Raises ValueError."""
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
    """Raises ValueError for unusual spellings."""
    if text.lower() in TRUE:
        return True
    if text.lower() in FALSE:
        return False
    raise ValueError("must be true or false (yes or no, on or off, 1 or 0)")


def parse_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _alternatives(words: Sequence[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


PREFIX = "LEASEHOLD_"


class VariableText(str):
    __slots__ = ("is_set", "variable")
    variable: str
    is_set: bool

    @classmethod
    def read(
        cls, variable: str, default: str = "", environ: Mapping[str, str] = os.environ
    ) -> "VariableText":
        text = cls(environ.get(variable, default))
        text.variable = variable
        text.is_set = variable in environ
        return text


def argument_reader(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return the `type` of an argument, whose value `read` parses or refuses with ValueError.

    An invalid variable raises RequestError with its name.
    """

    def parse(text: str) -> Any:
        try:
            return read(str(text))
        except ValueError as error:
            shown = f"{without_password(text)!r} {error}"
            if isinstance(text, VariableText) and text.is_set:
                raise RequestError(f"{text.variable}={shown}") from error
            raise argparse.ArgumentTypeError(shown) from error

    return parse


def number_argument(
    kind: type[int] | type[float], at_least: float = 0, at_most: float = MAX_NUMBER
) -> Callable[[str], Any]:
    bounds = ValueBounds(at_least=at_least, at_most=at_most)
    return argument_reader(lambda text: parse_number(text, kind, bounds))


def own_variables(environ: Mapping[str, str]) -> list[str]:
    """Leave out those that Kubernetes sets for a Service `leasehold...`."""
    names = (name for name in environ if name.startswith(PREFIX))
    return sorted(name for name in names if not _is_of_service(name, environ))


NEAR = 0.87
"""Two letters exchanged in eight. No setting of others is so similar."""


def check_variables(environ: Mapping[str, str], own: AbstractSet[str]) -> None:
    """Raise RequestError for a variable whose name is nearly that of a setting in `own`.

    Others may be settings of other components: all may be in one ConfigMap.
    """
    words = [name.removeprefix(PREFIX) for name in sorted(own)]
    for name in own_variables(environ):
        if name in own:
            continue
        near = difflib.get_close_matches(name.removeprefix(PREFIX), words, n=1, cutoff=NEAR)
        if near:
            raise RequestError(f"{name} is not a setting; did you mean {PREFIX}{near[0]}?")


_OF_SERVICE = re.compile(r"(\w+?)_(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT(?:_\d+_[A-Z]+\w*)?)")


def _is_of_service(name: str, environ: Mapping[str, str]) -> bool:
    """Kubernetes also sets a SERVICE_HOST for the Service."""
    match = _OF_SERVICE.fullmatch(name)
    return match is not None and f"{match[1]}_SERVICE_HOST" in environ


def variable_of(name: str) -> str:
    """Return the variable of a setting.

    >>> variable_of("redis_url")
    'LEASEHOLD_REDIS_URL'
    """
    return PREFIX + name.upper()
