"""Leadership: of the replicas of a service, one acts at a time."""

from dataclasses import dataclass
from uuid import uuid4

from shared.ledger.preemptions import Preemptions

LEADERSHIP_S = 5.0
"""A leader that dies is replaced after this time at the latest: a service resumes within 10 s."""


@dataclass(eq=False)
class Leadership:
    """A replica that was delayed may act after another one has begun to lead.

    All that it writes therefore names the version that was read.
    """

    store: Preemptions
    service: str

    def __post_init__(self) -> None:
        self.name = uuid4().hex

    async def holds(self) -> bool:
        return await self.store.acquire_leadership(self.service, self.name, ttl_s=LEADERSHIP_S)
