"""Connections to Redis or Valkey; files that say who we are and who it is are read at each."""

from collections.abc import Mapping
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import ConnectionError as RedisConnectionError

from shared.credentials.logins import ClientCredentials
from shared.credentials.tls import TlsFiles
from shared.ledger.sentinel import is_by_sentinels, primary_pool
from shared.model.errors import RequestError


class _InFile(CredentialProvider):  # type: ignore[misc]
    """The user and secret that a file holds at the moment of connecting."""

    def __init__(self, keys: ClientCredentials) -> None:
        self._keys = keys

    def get_credentials(self) -> tuple[str, ...]:
        try:
            login = self._keys.login()
        except RequestError as error:
            raise RedisConnectionError(str(error)) from error
        return (login.user, login.secret) if login else ()

    async def get_credentials_async(self) -> tuple[str, ...]:
        return self.get_credentials()


class _Covered(redis.asyncio.SSLConnection):  # type: ignore[misc]
    """A connection under TLS by the files as they are at the moment of connecting."""

    def __init__(self, *, files: TlsFiles, **rest: Any) -> None:
        self._files = files
        super().__init__(**rest)

    def _connection_arguments(self) -> Mapping[str, Any]:
        try:
            return {**super()._connection_arguments(), "ssl": self._files.context()}
        except RequestError as error:
            raise RedisConnectionError(str(error)) from error


def connection_pool(
    url: str, credentials: ClientCredentials, *, timeout_s: float
) -> redis.asyncio.ConnectionPool:
    """Return a pool of connections; nothing is tried twice, and no answer is waited for for ever.

    Raises RequestError for what is no address, for files of TLS with one that speaks none, and for
    one that names Sentinels and no primary.
    """
    if credentials.tls and not url.startswith("rediss"):
        scheme = url.partition("://")[0]
        raise RequestError(
            f"--redis-ca-file or --redis-certificate-file is given, and --redis-url {scheme}:// "
            "speaks no TLS: write rediss://HOST:PORT, or rediss+sentinel://"
        )
    if is_by_sentinels(url):
        return primary_pool(url, credentials, timeout_s=timeout_s, pools=_direct)
    return _direct(url, credentials, timeout_s)


def _direct(url: str, keys: ClientCredentials, timeout_s: float) -> redis.asyncio.ConnectionPool:
    try:
        pool = redis.asyncio.ConnectionPool.from_url(
            url,
            protocol=2,
            socket_timeout=None,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            **({"credential_provider": _InFile(keys)} if keys.credentials else {}),
        )
    except ValueError as error:
        raise RequestError(  # and not what it is: there may be a secret in it
            "--redis-url is no address of a Redis: write redis://HOST:PORT/0, or rediss:// or "
            "redis+sentinel://"
        ) from error
    if keys.tls:
        pool.connection_class = _Covered
        pool.connection_kwargs["files"] = keys.tls
    return pool
