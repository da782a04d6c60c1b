"""Routes of the API, and one request: its sender, parameters and body."""

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar, get_type_hints

import msgspec

from services.api.projection.visible_cluster import NamespaceFilter
from shared.credentials.authorization import Viewer
from shared.model.errors import UNDECODABLE, RequestError
from shared.model.views.view import View

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiCall:
    viewer: Viewer
    visible: NamespaceFilter
    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    anonymous: bool = False
    """The viewer has sent no token, and needs none to read."""

    def decode(self, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(self.body, type=kind)
        except UNDECODABLE as error:
            raise RequestError(f"the body is not valid: {error}") from error

    def number(self, name: str) -> float | None:
        """Raises RequestError unless it is a number of 0 or more."""
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
        """Raises RequestError unless it is an instant, RFC 3339."""
        text = self.query.get(name, "")
        try:
            return round(datetime.fromisoformat(text).timestamp() * 1000) if text else None
        except (ValueError, OverflowError) as error:
            raise RequestError(
                f"{name}={text} is not a time such as 2031-05-01T00:00:00Z"
            ) from error

    def period_ms(self) -> tuple[int | None, int | None]:
        start, end = self.instant_ms("from"), self.instant_ms("to")
        if start is not None and end is not None and start >= end:
            raise RequestError(f"from={self.query['from']} is not before to={self.query['to']}")
        return start, end


Handler = Callable[[Any, ApiCall], Awaitable[Any]]
H = TypeVar("H", bound=Handler)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    path: str
    handler: Handler
    query: Mapping[str, str]
    needs_sync: bool
    """Unavailable before the ledger was read for the first time."""
    body: type[View] | None
    """None for a GET."""

    @property
    def method(self) -> str:
        return "POST" if self.body else "GET"

    @property
    def returns(self) -> Any:
        return get_type_hints(self.handler)["return"]


class RouteTable(list[Route]):
    """For example, `@ROUTES.at("/api/v1/gpus", needs_sync=True)` above a method serves the path."""

    def at(
        self,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        needs_sync: bool = False,
        body: type[View] | None = None,
    ) -> Callable[[H], H]:
        parts: Any = {"path": path, "query": query or {}, "needs_sync": needs_sync, "body": body}

        def add(handler: H) -> H:
            self.append(Route(handler=handler, **parts))
            return handler

        return add
