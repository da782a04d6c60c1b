"""Checks of NATS servers, and reloads of their configuration."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterable
from datetime import datetime
from typing import Any

from shared.credentials.logins import ClientCredentials
from shared.model.findings import DIAGNOSIS_TIMEOUT_S
from shared.nats.connection import connected

LISTEN_S = 1.0
"""The time that servers of a cluster have to respond."""
RELOAD_PATIENCE_S = 10.0
"""How long a server may take to read its configuration again."""


async def reload_servers(url: str, credentials: ClientCredentials) -> int:
    """Return the number of servers, which then close all connections.

    Raises UnavailableError if no server accepts our login.
    """
    async with _connected(url, credentials, "leasehold reload") as client:
        replies = await _replies(client, ["$SYS.REQ.SERVER.PING"])
        servers = {reply["server"]["id"] for reply in replies}
        await _replies(client, [f"$SYS.REQ.SERVER.{server}.RELOAD" for server in servers])
        return len(servers)


async def certificate_expirations(url: str, credentials: ClientCredentials) -> set[datetime | None]:
    """Return when each certificate expires, or None for no certificate.

    Raises UnavailableError if no server accepts our login, or its certificate is not trusted.
    """
    async with _connected(url, credentials, "leasehold certificates") as client:
        replies = await _replies(client, ["$SYS.REQ.SERVER.PING.VARZ"])
    expirations = (reply.get("data", {}).get("tls_cert_not_after") for reply in replies)
    return {datetime.fromisoformat(at) if at else None for at in expirations}


async def connection_facts(url: str, credentials: ClientCredentials) -> tuple[int, float]:
    """Return how many bytes a message may have, and the seconds that it took to connect."""
    began_s = time.monotonic()
    async with _connected(
        url, credentials, "leasehold doctor", patience_s=DIAGNOSIS_TIMEOUT_S
    ) as client:
        return int(client.max_payload), time.monotonic() - began_s


@contextlib.asynccontextmanager
async def _connected(
    url: str, credentials: ClientCredentials, name: str, *, patience_s: float = RELOAD_PATIENCE_S
) -> AsyncIterator[Any]:
    client = await connected(url, name=name, credentials=credentials, patience_s=patience_s)
    try:
        yield client
    finally:
        await client.close()


async def _replies(client: Any, subjects: Iterable[str]) -> list[Any]:
    """Servers ignore a request without a reply subject."""
    replies = list[Any]()
    inbox = client.new_inbox()

    async def collect(message: Any) -> None:
        replies.append(json.loads(message.data))

    await client.subscribe(inbox, cb=collect)
    for subject in subjects:
        await client.publish(subject, b"", reply=inbox)
    await client.flush()
    await asyncio.sleep(LISTEN_S)
    return replies
