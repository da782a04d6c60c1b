"""Faults on demand, for tests: the next requests that match are answered wrongly, or not."""

import asyncio
from dataclasses import dataclass, field

from aiohttp import web

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import Json


@dataclass(slots=True, kw_only=True)
class InjectedFault:
    """The next `count` requests to paths that begin with `path` fail.

    `code` is answered as a Status, with Retry-After where given; 0 resets the connection. With
    `delay_s` the request first waits, and with code 200 it is then served.
    """

    path: str
    method: str = ""
    count: int = 1
    code: int = 500
    retry_after_s: int | None = None
    delay_s: float = 0.0

    def hits(self, method: str, path: str) -> bool:
        """Return whether the request is meant, and use the fault up by one if it is."""
        if self.count < 1 or not path.startswith(self.path):
            return False
        if self.method and self.method != method:
            return False
        self.count -= 1
        return True


_REASONS = {429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable"}


@dataclass(slots=True)
class FaultInjector:
    """The faults that are still to happen."""

    pending: list[InjectedFault] = field(default_factory=list)

    def add(self, described: Json) -> None:
        """Add a fault from its JSON description; 400 for unknown fields."""
        try:
            self.pending.append(InjectedFault(**described))
        except TypeError as error:
            raise ApiError.bad_request(f"a fault is described otherwise: {error}") from error

    async def inject(self, request: web.BaseRequest) -> None:
        """Do what the first matching fault says; nothing when none matches."""
        hit = next((each for each in self.pending if each.hits(request.method, request.path)), None)
        if hit is None:
            return
        self.pending = [each for each in self.pending if each.count > 0]
        await asyncio.sleep(hit.delay_s)
        if hit.code == 0:
            if request.transport is not None:
                request.transport.abort()
            raise asyncio.CancelledError
        if hit.code != 200:
            reason = _REASONS.get(hit.code, "InternalError")
            raise ApiError(
                hit.code, reason, "a fault asked for by a test", retry_after_s=hit.retry_after_s
            )
