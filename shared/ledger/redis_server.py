"""A Redis or Valkey server: its state for diagnosis, and its users as an administrator."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError, ResponseError

from shared.credentials.logins import NO_CREDENTIALS, ClientCredentials
from shared.credentials.tls import tls_fault
from shared.ledger.connection_pool import connection_pool
from shared.model.clock import clock_ahead_s
from shared.model.errors import UnavailableError
from shared.model.findings import DIAGNOSIS_TIMEOUT_S

_KEY = "lh:doctor"
_KEY_FAMILIES = ("lh", "lh-quotas", "lh-preemption", "lh-budget")
_REPLAYED_COMMANDS = (
    *(("SET", f"{family}:doctor", "0") for family in _KEY_FAMILIES),
    ("HSET", _KEY, "field", "0"), ("HDEL", _KEY, "field"), ("DEL", _KEY), ("SADD", _KEY, "0"),
    ("ZADD", _KEY, "0", "0"), ("XADD", _KEY, "*", "field", "0"), ("PEXPIREAT", _KEY, "1"),
)  # fmt: skip
"""As in an append-only file: each family of keys, and each kind of write."""
_FAITHFUL_VALKEY = (9, 1)
"""From this version on, Valkey replays its append-only file with all rights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisFacts:
    program: str = "Redis"
    version: str = ""
    role: str = ""
    replicas: int = 0
    appendonly: str = ""
    maxmemory_policy: str = ""
    last_write_succeeded: bool = True
    replay_refusal: str = ""
    """Why its user `default` may not run a command of its append-only file.

    Only where the server replays that file with the rights of this user.
    """
    ahead_s: float = 0.0
    reply_s: float = 0.0
    used_mib: int = 0
    most_mib: int = 0


async def redis_facts(
    url: str,
    credentials: ClientCredentials = NO_CREDENTIALS,
    *,
    timeout_s: float = DIAGNOSIS_TIMEOUT_S,
) -> RedisFacts:
    async with _connected(url, credentials, timeout_s) as client:
        began_s = time.monotonic()
        await client.ping()
        connected_s = time.monotonic() - began_s
        before = time.time()
        seconds, micros = await client.time()
        after = time.time()
        replication: dict[str, Any] = await client.info("replication")
        persistence: dict[str, Any] = await client.info("persistence")
        server: dict[str, Any] = await client.info("server")
        memory: dict[str, Any] = await client.info("memory")
        valkey = str(server.get("valkey_version", ""))
        return RedisFacts(
            program="Valkey" if valkey else "Redis",
            version=valkey or str(server.get("redis_version", "")),
            role=str(replication.get("role", "")),
            replicas=int(replication.get("connected_slaves", 0)),
            appendonly="yes" if persistence.get("aof_enabled") else "no",
            maxmemory_policy=await _maxmemory_policy(client),
            last_write_succeeded=persistence.get("aof_last_write_status", "ok") == "ok",
            replay_refusal=await _replay_refusal(client, valkey),
            ahead_s=clock_ahead_s(seconds + micros / 1e6, before, after),
            reply_s=max(connected_s, after - before),
            used_mib=int(memory.get("used_memory", 0)) >> 20,
            most_mib=int(memory.get("maxmemory", 0)) >> 20,
        )


@asynccontextmanager
async def _connected(
    url: str, credentials: ClientCredentials, timeout_s: float = DIAGNOSIS_TIMEOUT_S
) -> AsyncIterator[Any]:
    """Yield a client for `timeout_s`; what the server refuses is an UnavailableError."""
    client = redis.asyncio.Redis.from_pool(connection_pool(url, credentials, timeout_s=timeout_s))
    try:
        async with asyncio.timeout(timeout_s):
            yield client
    except (RedisError, OSError, TimeoutError) as error:
        late = f"no reply within {timeout_s:g} s" if type(error) is TimeoutError else ""
        reason = late or tls_fault(error, flag="--redis") or str(error) or type(error).__name__
        raise UnavailableError(f"Redis: {reason}") from error
    finally:
        await client.aclose()


async def _maxmemory_policy(client: Any) -> str:
    try:
        return str((await client.config_get("maxmemory-policy")).get("maxmemory-policy", ""))
    except ResponseError:  # a managed server does not show its configuration
        return ""


async def _replay_refusal(client: Any, valkey_version: str) -> str:
    numbers = valkey_version.split(".")[:2]
    if all(map(str.isdecimal, numbers)) and tuple(map(int, numbers)) >= _FAITHFUL_VALKEY:
        return ""
    return await default_user_refusal(client)


async def default_user_refusal(client: Any) -> str:
    """Return the first reason why the user `default` could not write the ledger, or "".

    Also empty if we may not run `ACL DRYRUN`, or the server lacks it.
    """
    for command in _REPLAYED_COMMANDS:
        try:
            reply = await client.execute_command("ACL", "DRYRUN", "default", *command)
        except ResponseError:
            return ""
        text = reply.decode() if isinstance(reply, bytes) else str(reply)
        if text != "OK":
            return text
    return ""


async def set_users(
    url: str, credentials: ClientCredentials, users: Sequence[Sequence[str]]
) -> None:
    """Set rights, for each user its name and the words of an ACL rule; others stay."""
    commands = [("ACL", "SETUSER", name, "reset", *words) for name, *words in users]
    await _execute_all(url, credentials, commands)


async def reload_certificate(url: str, credentials: ClientCredentials, directory: str) -> None:
    """Make the server reload its certificate, key and CAs from a directory on its machine."""
    files = {"cert": "server.crt", "key": "server.key", "ca-cert": "ca.crt"}
    settings = [(f"tls-{part}-file", f"{directory}/{name}") for part, name in files.items()]
    await _execute_all(url, credentials, [("CONFIG", "SET", *chain.from_iterable(settings))])


async def ping(url: str, credentials: ClientCredentials) -> None:
    await _execute_all(url, credentials, [("PING",)])


async def _execute_all(
    url: str, credentials: ClientCredentials, commands: Sequence[Sequence[str]]
) -> None:
    async with _connected(url, credentials) as client:
        for command in commands:
            await client.execute_command(*command)
