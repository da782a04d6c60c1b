"""The watcher's sources of ResourceClaims and DeviceClasses."""

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field

from services.watcher.claiming_pods import ClaimUpdate, requested_classes
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import NotFoundError
from shared.kubernetes.reflector import follow
from shared.kubernetes.resource_claims import (
    CLAIMS_PATH,
    CLASSES_PATH,
    ApiResourceClaim,
    DeviceClass,
    allocated_claim,
)
from shared.model.errors import RequestError
from shared.model.events.claim_events import AllocatedClaim
from shared.model.names import Namespace, PodUid

logger = logging.getLogger(__name__)

RETRY_S = 30.0
"""The interval at which a kind is requested that the API server does not know."""


@dataclass(slots=True)
class ClaimReflector:
    client: KubernetesClient
    retry_s: float = RETRY_S
    unreadable: str = field(default="", init=False)
    _logged: str = field(default="", init=False)

    async def batches(self) -> AsyncIterator[list[ClaimUpdate]]:
        following = follow(self.client, CLAIMS_PATH, ApiResourceClaim, retry_s=self.retry_s)
        async with aclosing(following) as batches:
            async for batch in batches:
                if isinstance(batch.refusal, NotFoundError):
                    self._log_once(f"ResourceClaims are not watched: {batch.refusal}")
                elif batch.refusal is not None:
                    self._refused(batch.refusal)
                else:
                    if batch.listed:
                        self.unreadable = ""
                    yield [
                        ClaimUpdate(
                            PodUid(named.uid),
                            Namespace(named.namespace),
                            named.name,
                            self._parse(item) if item else None,
                            requested_classes(item) if item else frozenset(),
                        )
                        for named, item in batch.changed
                    ]

    async def list_all(self) -> tuple[AllocatedClaim, ...]:
        """Return none without the API or the permission.

        The absence of a claim from this list alone ends no lease.
        """
        allocated: list[AllocatedClaim] = []
        try:
            async for page in self.client.pages(CLAIMS_PATH):
                claims = page.read(ApiResourceClaim, skip=self._ignore)
                allocated += filter(None, map(self._parse, claims))
        except NotFoundError:
            pass
        except RequestError as error:
            self._refused(error)
            return ()
        self.unreadable = ""
        return tuple(allocated)

    def _parse(self, claim: ApiResourceClaim) -> AllocatedClaim | None:
        try:
            return allocated_claim(claim)
        except RequestError as error:
            self._ignore(error)
            return None

    def _ignore(self, error: RequestError) -> None:
        self._log_once(f"a claim is ignored: {error}")

    def _refused(self, error: RequestError) -> None:
        self.unreadable = f"ResourceClaims cannot be read: {error}"
        self._log_once(self.unreadable)

    def _log_once(self, text: str) -> None:
        if text != self._logged:
            logger.warning("%s", text)
            self._logged = text


@dataclass(slots=True)
class DeviceClassReflector:
    """Which DeviceClasses are for our devices."""

    client: KubernetesClient
    retry_s: float = RETRY_S

    async def batches(self) -> AsyncIterator[dict[str, bool]]:
        following = follow(self.client, CLASSES_PATH, DeviceClass, retry_s=self.retry_s)
        refused = ""
        async with aclosing(following) as batches:
            async for batch in batches:
                if batch.refusal is None:
                    yield {
                        named.name: item is not None and item.is_ours
                        for named, item in batch.changed
                    }
                elif str(batch.refusal) != refused and not isinstance(batch.refusal, NotFoundError):
                    refused = str(batch.refusal)
                    logger.warning(
                        "pods of other schedulers that wait for ResourceClaims are not listed: %s",
                        refused,
                    )
