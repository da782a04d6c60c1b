"""Whether the API server responds: the readiness probe of services that need it."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import ForbiddenError
from shared.model.clock import Clock, SystemClock, in_background
from shared.model.errors import LeaseholdError

logger = logging.getLogger(__name__)

INTERVAL_S = 5.0
"""The interval of requests that show whether the API server responds."""
RESPONSE_S = 4.0
"""A request that takes longer has failed."""
RETRY_S = 1.0
"""The pause before the request is repeated after a failure."""
PATH = "/version"
"""Every authenticated user may read it, and the API server has it in memory.

https://kubernetes.io/docs/reference/access-authn-authz/rbac/#discovery-roles
"""


class ApiServerReachability:
    def __init__(self, client: KubernetesClient, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._responded_at: float | None = None
        self._failure = "no response yet"

    @classmethod
    @asynccontextmanager
    async def observed(cls, client: KubernetesClient) -> AsyncIterator[Self]:
        reachability = cls(client, SystemClock())
        async with in_background(reachability.run()):
            yield reachability

    def unready_reason(self) -> str | None:
        limit_s = INTERVAL_S + RESPONSE_S
        if self._responded_at is not None and self._clock.ticks() < self._responded_at + limit_s:
            return None
        return f"requests to the API server fail: {self._failure}"

    async def run(self) -> None:
        while True:
            pause_s = RETRY_S
            try:
                await self._request()
                pause_s = INTERVAL_S
            except LeaseholdError as error:
                self._failure = str(error)
            except TimeoutError:
                self._failure = f"no response within {RESPONSE_S:g} s"
            await self._clock.sleep(pause_s)

    async def _request(self) -> None:
        """A missing permission does not make the API server unusable."""
        async with asyncio.timeout(RESPONSE_S):
            try:
                await self._client.read(PATH)
            except ForbiddenError as error:
                logger.debug("%s", error)
        self._responded_at = self._clock.ticks()
