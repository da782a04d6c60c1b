"""What NATS and Redis say of themselves, for whoever looks for trouble; asked once, never again."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nats.errors
import nats.js.errors
import redis.asyncio
from redis.exceptions import RedisError, ResponseError

from shared.clients.bus_connection import connected
from shared.clients.logins import load_login
from shared.clients.subjects import STREAM
from shared.model.errors import UnavailableError

LIMIT_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisFacts:
    """A Redis or Valkey server; what it does not tell is empty."""

    role: str = ""
    replicas: int = 0
    appendonly: str = ""
    policy: str = ""
    """What it does when memory runs out."""
    written: bool = True
    """Its last write to disk succeeded."""
    ahead_s: float = 0.0
    """How far its clock is ahead of ours."""


def ahead_s(theirs: float, before: float, after: float) -> float:
    """Return how far a clock is ahead for certain that was read between two times of ours."""
    return max(theirs - after, min(0.0, theirs - before))


async def redis_facts(url: str, credentials: Path | None = None) -> RedisFacts:
    """Ask a server, as the user in the file. Raises UnavailableError if it does not answer."""
    login = load_login(credentials) if credentials else None
    client = redis.asyncio.Redis.from_url(
        url,
        socket_timeout=LIMIT_S,
        socket_connect_timeout=LIMIT_S,
        **({"username": login.user, "password": login.secret} if login else {}),
    )
    try:
        await client.ping()
        before = time.time()
        seconds, micros = await client.time()
        after = time.time()
        replication: dict[str, Any] = await client.info("replication")
        persistence: dict[str, Any] = await client.info("persistence")
        return RedisFacts(
            role=str(replication.get("role", "")),
            replicas=int(replication.get("connected_slaves", 0)),
            appendonly="yes" if persistence.get("aof_enabled") else "no",
            policy=await _policy(client),
            written=persistence.get("aof_last_write_status", "ok") == "ok",
            ahead_s=ahead_s(seconds + micros / 1e6, before, after),
        )
    except (RedisError, OSError) as error:
        raise UnavailableError(f"Redis: {error or type(error).__name__}") from error
    finally:
        await client.aclose()


async def _policy(client: Any) -> str:
    try:
        return str((await client.config_get("maxmemory-policy")).get("maxmemory-policy", ""))
    except ResponseError:  # a managed server keeps its configuration to itself
        return ""


async def stream_messages(url: str, credentials: Path | None) -> int | None:
    """Return how many messages our stream holds; None: there is no such stream.

    Raises UnavailableError if NATS, or its JetStream, does not answer.
    """
    client = await connected(
        url, name="leasehold doctor", credentials=credentials, patience_s=LIMIT_S
    )
    try:
        found = await client.jetstream(timeout=LIMIT_S).stream_info(STREAM)
    except nats.js.errors.NotFoundError:
        return None
    except (nats.errors.Error, TimeoutError) as error:
        raise UnavailableError(
            f"NATS answers, its JetStream does not: {error or type(error).__name__}"
        ) from error
    else:
        return int(found.state.messages)
    finally:
        await client.close()
