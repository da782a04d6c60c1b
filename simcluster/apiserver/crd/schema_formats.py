"""The formats of strings and numbers that a schema may require; pure."""

import base64
import binascii
import ipaddress
import re
import uuid
from collections.abc import Callable, Mapping
from datetime import date, datetime
from typing import Any
from urllib.parse import urlsplit

from simcluster.apimachinery.names import is_subdomain

_DURATION = re.compile(
    r"[+-]?(\d+(\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)((\d+(\.\d*)?)(ns|us|µs|ms|s|m|h))*"
)
_EMAIL = re.compile(r"[^@\s]+@[^@\s]+")


def _reads(parse: Callable[[str], Any]) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        try:
            parse(text)
        except (ValueError, binascii.Error):
            return False
        return True

    return check


_TEXT: Mapping[str, Callable[[str], bool]] = {
    "byte": _reads(lambda text: base64.b64decode(text, validate=True)),
    "cidr": _reads(lambda text: ipaddress.ip_network(text, strict=False)),
    "date": _reads(date.fromisoformat),
    "date-time": _reads(datetime.fromisoformat),
    "datetime": _reads(datetime.fromisoformat),
    "duration": lambda text: text == "0" or _DURATION.fullmatch(text) is not None,
    "email": lambda text: _EMAIL.fullmatch(text) is not None,
    "hostname": lambda text: is_subdomain(text.lower()),
    "ipv4": _reads(ipaddress.IPv4Address),
    "ipv6": _reads(ipaddress.IPv6Address),
    "uri": lambda text: bool(urlsplit(text).scheme),
    "uuid": _reads(uuid.UUID),
}
_WHOLE = {"int32": 1 << 31, "int64": 1 << 63}


def has_format(name: str, value: object) -> bool:
    """Return whether a value has a format; every value has an unknown format."""
    if name in _WHOLE and isinstance(value, int) and not isinstance(value, bool):
        return -_WHOLE[name] <= value < _WHOLE[name]
    if isinstance(value, str) and name in _TEXT:
        return _TEXT[name](value)
    return True
