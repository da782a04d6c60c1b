"""Who may what at a running Redis or Valkey, as its administrator sets it."""

import asyncio
from collections.abc import Sequence

import redis.asyncio
from redis.exceptions import RedisError

from shared.credentials.logins import Keys
from shared.credentials.tls import tls_fault
from shared.ledger.pool import pool_of
from shared.model.errors import UnavailableError

LIMIT_S = 10.0


async def set_users(url: str, keys: Keys, users: Sequence[Sequence[str]]) -> None:
    """Give users the rights that these words say, beginning with the name; others are left alone.

    Connections go on. Raises UnavailableError if the server does not take us, or the words.
    """
    await _told(url, keys, [("ACL", "SETUSER", name, "reset", *words) for name, *words in users])


async def show_files(url: str, keys: Keys, certificate: str, key: str) -> None:
    """Have the server read its certificate and key from these files of its own anew."""
    await _told(url, keys, [("CONFIG", "SET", "tls-cert-file", certificate, "tls-key-file", key)])


async def _told(url: str, keys: Keys, commands: Sequence[Sequence[str]]) -> None:
    client = redis.asyncio.Redis.from_pool(pool_of(url, keys, timeout_s=LIMIT_S))
    try:
        async with asyncio.timeout(LIMIT_S):
            for command in commands:
                await client.execute_command(*command)
    except (RedisError, OSError, TimeoutError) as error:
        fault = tls_fault(error, flag="--redis") or str(error) or type(error).__name__
        raise UnavailableError(f"Redis does not take its users from us: {fault}") from error
    finally:
        await client.aclose()
