"""Requests to NATS servers as a user of the system account."""

import asyncio
import json

from shared.credentials.logins import ClientCredentials
from shared.nats.connection import connected

LISTEN_S = 1.0
"""Time that servers of a cluster have to respond."""
PATIENCE_S = 10.0


async def reload_servers(url: str, keys: ClientCredentials) -> int:
    """Reload the configuration of every server; return the number of servers.

    Connections are made anew by that. Raises UnavailableError if no server takes us.
    """
    client = await connected(url, name="leasehold reload", keys=keys, patience_s=PATIENCE_S)
    try:
        found: set[str] = set()
        inbox = client.new_inbox()

        async def heard(message: object) -> None:
            found.add(str(json.loads(message.data)["server"]["id"]))  # type: ignore[attr-defined]

        await client.subscribe(inbox, cb=heard)
        await client.publish("$SYS.REQ.SERVER.PING", b"", reply=inbox)
        await asyncio.sleep(LISTEN_S)
        asked = f"{inbox}.reloaded"
        await client.subscribe(asked, cb=heard)
        for server in found:  # without somewhere to answer to, a server does nothing
            await client.publish(f"$SYS.REQ.SERVER.{server}.RELOAD", b"", reply=asked)
        await client.flush()
        await asyncio.sleep(LISTEN_S)
        return len(found)
    finally:
        await client.close()
