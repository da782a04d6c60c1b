"""One request to the API: who sent it, its parameters, and its body."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar

import msgspec

from services.api.visible_cluster import NamespaceFilter
from shared.credentials.authorization import Viewer
from shared.model.errors import RequestError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiCall:
    """One request of an authenticated viewer."""

    viewer: Viewer
    visible: NamespaceFilter
    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    anonymous: bool = False
    """The viewer has sent no token, and needs none to read."""

    def decode(self, kind: type[T]) -> T:
        """Return the body. Raises RequestError with what is wrong with it."""
        try:
            return msgspec.json.decode(self.body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RequestError(f"the body is not valid: {error}") from error

    def number(self, name: str) -> float | None:
        """Return a parameter. Raises RequestError if it is not a number of 0 or more."""
        text = self.query.get(name, "")
        if not text:
            return None
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not (math.isfinite(seconds) and seconds >= 0):
            raise RequestError(f"{name}={text} is not a number of 0 or more")
        return seconds

    def instant_ms(self, name: str) -> int | None:
        """Return a parameter that is an instant, RFC 3339. Raises RequestError for other text."""
        text = self.query.get(name, "")
        try:
            return round(datetime.fromisoformat(text).timestamp() * 1000) if text else None
        except (ValueError, OverflowError) as error:
            raise RequestError(
                f"{name}={text} is not a time such as 2031-05-01T00:00:00Z"
            ) from error
