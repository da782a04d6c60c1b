"""Checks of NATS servers, and reloads of their configuration."""

import asyncio
import json
from datetime import datetime

from shared.credentials.logins import ClientCredentials
from shared.nats.connection import connected

LISTEN_S = 1.0
"""Time that servers of a cluster have to respond."""
RELOAD_PATIENCE_S = 10.0


async def reload_servers(url: str, credentials: ClientCredentials) -> int:
    """Reload the configuration of every server; return the number of servers.

    Servers close all connections then. Raises UnavailableError if no server accepts our login.
    """
    client = await connected(
        url, name="leasehold reload", credentials=credentials, patience_s=RELOAD_PATIENCE_S
    )
    try:
        found: set[str] = set()
        inbox = client.new_inbox()

        async def collect(message: object) -> None:
            found.add(str(json.loads(message.data)["server"]["id"]))  # type: ignore[attr-defined]

        await client.subscribe(inbox, cb=collect)
        await client.publish("$SYS.REQ.SERVER.PING", b"", reply=inbox)
        await asyncio.sleep(LISTEN_S)
        reply_subject = f"{inbox}.reloaded"
        await client.subscribe(reply_subject, cb=collect)
        for server in found:  # a server ignores a request without a reply subject
            await client.publish(f"$SYS.REQ.SERVER.{server}.RELOAD", b"", reply=reply_subject)
        await client.flush()
        await asyncio.sleep(LISTEN_S)
        return len(found)
    finally:
        await client.close()


async def certificate_expirations(url: str, credentials: ClientCredentials) -> set[datetime | None]:
    """Return when the certificate expires that each server serves to clients, None without one.

    Raises UnavailableError if no server accepts our login, or its certificate is not trusted.
    """
    client = await connected(
        url, name="leasehold certificates", credentials=credentials, patience_s=RELOAD_PATIENCE_S
    )
    try:
        found: set[datetime | None] = set()

        async def collect(message: object) -> None:
            data = json.loads(message.data).get("data", {})  # type: ignore[attr-defined]
            expires = data.get("tls_cert_not_after")
            found.add(datetime.fromisoformat(expires) if expires else None)

        inbox = client.new_inbox()
        await client.subscribe(inbox, cb=collect)
        await client.publish("$SYS.REQ.SERVER.PING.VARZ", b"", reply=inbox)
        await client.flush()
        await asyncio.sleep(LISTEN_S)
        return found
    finally:
        await client.close()


TIMEOUT_S = 8.0
"""Longer than a busy machine needs: slowness is not the problem that a diagnosis looks for."""
_CLIENT_NAME = "leasehold doctor"


async def check_connection(url: str, credentials: ClientCredentials) -> None:
    """Connect and disconnect. Raises UnavailableError with the reason if that fails."""
    client = await connected(url, name=_CLIENT_NAME, credentials=credentials, patience_s=TIMEOUT_S)
    await client.close()
