"""ResourceClaims of the API server, if it has them."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field

from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import NotFoundError
from shared.kubernetes.known_objects import ObjectAdded, ObjectDeleted, ObjectUpdated
from shared.kubernetes.reflector import Reflector
from shared.kubernetes.resource_claims import CLAIMS_PATH, ApiResourceClaim, allocated_claim
from shared.model.errors import RequestError
from shared.model.events.claim_events import AllocatedClaim
from shared.model.names import PodUid

logger = logging.getLogger(__name__)

RETRY_S = 30.0
"""The interval at which an API that is not there, or not readable, is requested again."""


@dataclass(slots=True)
class ClaimReflector:
    """ResourceClaims; a cluster without `resource.k8s.io/v1` has none, which is logged once."""

    client: KubernetesClient
    retry_s: float = RETRY_S
    synced: bool = field(default=False, init=False)
    unreadable: str = field(default="", init=False)
    """Why claims cannot be read, although the API server has them; empty: they can."""
    _logged: str = field(default="", init=False)

    async def batches(self) -> AsyncIterator[list[tuple[PodUid, AllocatedClaim | None]]]:
        """Yield every change: the claim's uid, and its allocation if it has one of ours."""
        while True:
            try:
                async with aclosing(self._changes()) as changes:
                    async for batch in changes:
                        yield batch
            except NotFoundError as error:
                self._log_once(f"ResourceClaims are not watched: {error}")
            except RequestError as error:
                self._refused(error)
            self.synced = True
            await asyncio.sleep(self.retry_s)

    async def list_all(self) -> tuple[AllocatedClaim, ...]:
        """List all claims with an allocation of ours; none without the API or the permission.

        The ledger ends no lease of a claim for its absence in a list alone.
        """
        found: list[AllocatedClaim] = []
        try:
            async for page in self.client.pages(CLAIMS_PATH):
                claims = page.read(ApiResourceClaim, skip=self._ignore)
                found += filter(None, map(self._parse, claims))
        except NotFoundError:
            pass
        except RequestError as error:
            self._refused(error)
            return ()
        self.unreadable = ""
        return tuple(found)

    async def _changes(self) -> AsyncGenerator[list[tuple[PodUid, AllocatedClaim | None]]]:
        reflector = Reflector(self.client, CLAIMS_PATH, ApiResourceClaim)
        async with aclosing(reflector.batches()) as batches:
            async for batch in batches:
                changes: list[tuple[PodUid, AllocatedClaim | None]] = []
                for change in batch:
                    match change:
                        case ObjectAdded(item=item) | ObjectUpdated(item=item):
                            changes.append((PodUid(item.metadata.uid), self._parse(item)))
                        case ObjectDeleted(item=named):
                            changes.append((PodUid(named.uid), None))
                        case _:
                            self.synced, self.unreadable = True, ""
                yield changes

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
