"""What NATS and Redis say of themselves, for whoever looks for trouble; asked once, never again."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import nats.errors
import nats.js.errors
import redis.asyncio
from redis.exceptions import RedisError, ResponseError

from shared.credentials.logins import NO_KEYS, Keys
from shared.credentials.tls import tls_fault
from shared.ledger.pool import pool_of
from shared.model.errors import UnavailableError
from shared.nats.connection import connected
from shared.nats.subjects import STREAM

LIMIT_S = 8.0
"""A busy machine is slow, and that is another trouble than the one that is looked for."""
_KEY = "lh:doctor"
_FAMILIES = ("lh", "lh-quotas", "lh-preemption", "lh-budget")
_REPLAYED = (
    *(("SET", f"{family}:doctor", "0") for family in _FAMILIES),
    ("HSET", _KEY, "field", "0"), ("HDEL", _KEY, "field"), ("DEL", _KEY), ("SADD", _KEY, "0"),
    ("ZADD", _KEY, "0", "0"), ("XADD", _KEY, "*", "field", "0"), ("PEXPIREAT", _KEY, "1"),
)  # fmt: skip
"""What a server's file of writes is full of: each family of keys, and each kind of write."""
_FAITHFUL_VALKEY = (9, 1)
"""From this version on Valkey reads its file of writes back with all rights."""


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
    unreplayed: str = ""
    """What its user `default` may not do of what is in its file of writes, in its own words, if it
    reads that file back with the rights of this user: then it leaves it out."""
    ahead_s: float = 0.0
    """How far its clock is ahead of ours."""


def ahead_s(theirs: float, before: float, after: float) -> float:
    """Return how far a clock is ahead for certain that was read between two times of ours."""
    return max(theirs - after, min(0.0, theirs - before))


async def redis_facts(url: str, keys: Keys = NO_KEYS) -> RedisFacts:
    """Ask a server, as whom `keys` say. Raises UnavailableError if it does not answer."""
    client = redis.asyncio.Redis.from_pool(pool_of(url, keys, timeout_s=LIMIT_S))
    try:
        async with asyncio.timeout(LIMIT_S):
            return await _facts(client)
    except (RedisError, OSError, TimeoutError) as error:
        silent = f"it does not answer within {LIMIT_S:g} s" if type(error) is TimeoutError else ""
        why = silent or tls_fault(error, flag="--redis") or str(error) or type(error).__name__
        raise UnavailableError(f"Redis: {why}") from error
    finally:
        await client.aclose()


async def _facts(client: Any) -> RedisFacts:
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
        unreplayed=await _unreplayed(client),
        ahead_s=ahead_s(seconds + micros / 1e6, before, after),
    )


async def _policy(client: Any) -> str:
    try:
        return str((await client.config_get("maxmemory-policy")).get("maxmemory-policy", ""))
    except ResponseError:  # a managed server keeps its configuration to itself
        return ""


async def _unreplayed(client: Any) -> str:
    """Ask what `default` may do, if that matters; nothing is done, and no secret is shown."""
    server: dict[str, Any] = await client.info("server")
    numbers = str(server.get("valkey_version", "")).split(".")[:2]
    if all(map(str.isdecimal, numbers)) and tuple(map(int, numbers)) >= _FAITHFUL_VALKEY:
        return ""
    return await default_may_not(client)


async def default_may_not(client: Any) -> str:
    """Return the first reason for which the user `default` could not write the ledger; empty: none.

    Empty as well where we have no right to ask, or the server no answer.
    """
    for command in _REPLAYED:
        try:
            said = await client.execute_command("ACL", "DRYRUN", "default", *command)
        except ResponseError:
            return ""
        text = said.decode() if isinstance(said, bytes) else str(said)
        if text != "OK":
            return text
    return ""


async def let_in(url: str, keys: Keys) -> None:
    """Connect, and no more. Raises UnavailableError saying why NATS does not let us in."""
    client = await connected(url, name="leasehold doctor", keys=keys, patience_s=LIMIT_S)
    await client.close()


async def stream_messages(url: str, keys: Keys) -> int | None:
    """Return how many messages our stream holds; None: there is no such stream.

    Raises UnavailableError if NATS, or its JetStream, does not answer.
    """
    client = await connected(url, name="leasehold doctor", keys=keys, patience_s=LIMIT_S)
    try:
        found = await client.jetstream(timeout=LIMIT_S).stream_info(STREAM)
    except nats.js.errors.NotFoundError:
        return None
    except (nats.errors.Error, TimeoutError) as error:
        raise UnavailableError(
            f"NATS answers, its JetStream does not: {str(error) or type(error).__name__}"
        ) from error
    else:
        return int(found.state.messages)
    finally:
        await client.close()
