"""Closes connections of users that have more of them at a NATS server than their share.

nats-server bounds the connections of an account, not of a user. It reports each connection to the
account `SYS`, and lets one of our services receive these reports and close connections.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
import nats.errors
from prometheus_client import Counter

from shared.model.clock import ExpiringMap, in_background
from shared.model.errors import UNDECODABLE
from shared.nats import subjects
from shared.nats.bus import Bus

logger = logging.getLogger(__name__)

CLOSED = Counter(
    "leasehold_nats_connections_closed",
    "Connections to NATS closed, since their user had more than its share, or flooded NATS.",
)
GATHER_S = 0.25
"""Connections that are opened within this time share a look at those of their user."""
TIMEOUT_S = 5.0
"""How long servers may take to list the connections of a user."""
PAGE = 1024
WARN_AGAIN_S = 600.0
"""The interval of repeated warnings about a user."""
MAX_WARNED = 1_000
ANY_SERVER = "PING"
MAX_FLOODING = 1_000
MAX_REPORTS = 4096


class _Server(msgspec.Struct):
    id: str


class _Client(msgspec.Struct):
    user: str = ""


class _Report(msgspec.Struct):
    server: _Server
    client: _Client


class _Connection(msgspec.Struct):
    cid: int
    authorized_user: str = ""


class _Page(msgspec.Struct):
    connections: list[_Connection] = []


class _Listing(msgspec.Struct):
    server: _Server
    data: _Page


_UNREADABLE = (nats.errors.Error, TimeoutError, *UNDECODABLE)
_decode_report = msgspec.json.Decoder(_Report).decode
_decode_listing = msgspec.json.Decoder(_Listing).decode


@contextlib.asynccontextmanager
async def connection_shares(
    open_bus: Callable[[], AbstractAsyncContextManager[Bus]], *, flooded: Bus
) -> AsyncIterator[None]:
    """Agents that send more than their rate to `flooded` lose all their connections.

    Servers are reached by a connection of its own, so that no flood delays their replies.
    """

    async def run() -> None:
        await flooded.wait_connected()
        async with open_bus() as bus:
            await _ConnectionShares(bus, flooded).run()

    async with in_background(run()):
        yield


class _ConnectionShares:
    def __init__(self, bus: Bus, flooded: Bus) -> None:
        self._bus = bus
        self._flooded = flooded
        self._flooding: asyncio.Queue[str] = asyncio.Queue(MAX_FLOODING)
        self._grown: dict[str, set[str]] = defaultdict(set)
        """By server; "" is all users."""
        self._reported = asyncio.Event()
        self._warned: ExpiringMap[str, None] = ExpiringMap(
            time.monotonic, expires_s=WARN_AGAIN_S, most=MAX_WARNED
        )

    async def run(self) -> None:
        """Look at all connections once, then at those of each user that opens another."""
        await self._bus.wait_connected()
        client = self._bus.client
        await client.subscribe(
            subjects.CONNECTED,
            queue=subjects.CONNECTION_SHARES,
            cb=self._receive,
            pending_msgs_limit=MAX_REPORTS,
        )
        await self._note_any_server()
        async with in_background(self._close_flooding()):
            await self._close_grown()

    async def _close_grown(self) -> None:
        while True:
            await self._reported.wait()
            await asyncio.sleep(GATHER_S)
            self._reported.clear()
            grown, self._grown = self._grown, defaultdict(set)
            for server, users in grown.items():
                for user in {""} if "" in users else users:
                    await self._close_excess(server, user)

    async def _close_flooding(self) -> None:
        client = self._bus.client
        inbox = client.new_inbox()
        await client.subscribe(f"{inbox}.*", cb=self._close_listed)
        self._flooded.client.rates.on_excess = self._note_flooding
        while True:
            user = await self._flooding.get()
            request = {"auth": True, "acc": subjects.ACCOUNT, "user": user}
            with contextlib.suppress(nats.errors.Error):
                await client.publish(subjects.FLOODED, user.encode())
                await client.publish(
                    subjects.server_request(ANY_SERVER, "CONNZ"),
                    json.dumps(request).encode(),
                    reply=f"{inbox}.0",
                )

    def _note_flooding(self, user: str) -> None:
        with contextlib.suppress(asyncio.QueueFull):  # it is noted again in a second
            self._flooding.put_nowait(user)

    async def _close_listed(self, message: Any) -> None:
        with contextlib.suppress(*_UNREADABLE):
            listing = _decode_listing(message.data)
            await self._close(
                listing.server.id, [connection.cid for connection in listing.data.connections]
            )

    async def _note_any_server(self) -> None:
        with contextlib.suppress(*_UNREADABLE):
            self._note((await self._listing(ANY_SERVER, limit=1)).server.id, "")

    async def _receive(self, message: Any) -> None:
        with contextlib.suppress(*UNDECODABLE):
            report = _decode_report(message.data)
            self._note(report.server.id, report.client.user)

    def _note(self, server: str, user: str) -> None:
        self._grown[server].add(user)
        self._reported.set()

    async def _close_excess(self, server: str, user: str) -> None:
        connections = defaultdict[str, list[int]](list)
        try:
            async for connection in self._connections(server, user):
                connections[connection.authorized_user].append(connection.cid)
            for owner, cids in connections.items():
                if excess := cids[: -subjects.most_replicas(owner)]:
                    self._warn(owner, len(cids))
                    await self._close(server, excess)
        except _UNREADABLE as error:
            logger.debug("the connections of NATS server %s were not read: %r", server, error)

    def _warn(self, user: str, connections: int) -> None:
        if user not in self._warned:
            self._warned.set(user, None)
            logger.warning(
                "%s has %d connections to a NATS server, and its share is %d: the oldest are "
                "closed. If it runs once only, another program uses its login",
                user,
                connections,
                subjects.most_replicas(user),
            )

    async def _connections(self, server: str, user: str) -> AsyncIterator[_Connection]:
        offset = 0
        asked = {"user": user} if user else {}
        while True:
            page = (await self._listing(server, limit=PAGE, offset=offset, **asked)).data
            for connection in page.connections:
                yield connection
            if len(page.connections) < PAGE:
                return
            offset += PAGE

    async def _listing(self, server: str, **asked: object) -> _Listing:
        request = {"auth": True, "acc": subjects.ACCOUNT, "sort": "start", **asked}
        reply = await self._bus.client.request(
            subjects.server_request(server, "CONNZ"),
            json.dumps(request).encode(),
            timeout=TIMEOUT_S,
        )
        return _decode_listing(reply.data)

    async def _close(self, server: str, cids: Sequence[int]) -> None:
        """A server ignores a request without a reply subject."""
        subject = subjects.server_request(server, "KICK")
        inbox = self._bus.client.new_inbox()
        for cid in cids:
            request = json.dumps({"cid": cid}).encode()
            await self._bus.client.publish(subject, request, reply=f"{inbox}.{cid}")
        CLOSED.inc(len(cids))
