"""Requests leases from binders, since an update may be late or lost."""

from services.node_agent.records.known_leases import KnownLeases
from shared.model.events.node_events import LeaseHolder
from shared.model.events.request_reply import ClaimRestoreRequest, LeasesReply, LeasesRequest
from shared.model.leases.lease import Lease
from shared.model.names import PodUid
from shared.nats.bus import Bus

REPLY_S = 2.0
"""How long an agent waits for a binder's reply with leases; Allocate waits for longer in all."""


class LeaseSync:
    """All methods raise UnavailableError if no binder replies within `timeout_s`."""

    def __init__(self, leases: KnownLeases, bus: Bus) -> None:
        self.node = leases.node
        self.leases = leases
        self._bus = bus

    async def sync(self, *, timeout_s: float = REPLY_S) -> None:
        """A known lease that is missing from the reply has ended."""
        since = self.leases.revision
        reply = await self._request(LeasesRequest(node=self.node), timeout_s)
        self.leases.sync(reply.leases, since=since)

    async def fetch(self, *pods: PodUid, timeout_s: float = REPLY_S) -> tuple[Lease, ...]:
        """Without pods, request all. None ends by it."""
        since = self.leases.revision
        reply = await self._request(LeasesRequest(node=self.node, pods=pods), timeout_s)
        self.leases.observe_reply(reply.leases, since=since)
        return reply.leases

    async def fetch_claim(self, claim: LeaseHolder) -> tuple[Lease, ...]:
        """A claim's lease that was lost is restored."""
        since = self.leases.revision
        reply = await self._request(ClaimRestoreRequest(node=self.node, claim=claim), REPLY_S)
        self.leases.observe_reply(reply.leases, since=since)
        return reply.leases

    async def _request(
        self, request: LeasesRequest | ClaimRestoreRequest, timeout_s: float
    ) -> LeasesReply:
        return await self._bus.request(request, LeasesReply, timeout_s=timeout_s)
