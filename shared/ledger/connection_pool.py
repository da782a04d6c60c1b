"""The client of Redis or Valkey; files with credentials are read again for each connection."""

from collections.abc import Mapping
from typing import Any

import hiredis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.driver_info import DriverInfo
from redis.exceptions import ConnectionError as RedisConnectionError

from shared.credentials.logins import ClientCredentials
from shared.credentials.tls import TlsFiles
from shared.ledger.sentinel import primary_pool, uses_sentinels
from shared.model.errors import RequestError

_DRIVER_INFO = DriverInfo(lib_version=redis.__version__)
"""For CLIENT SETINFO; without a version, the library reads its metadata for each connection."""


class _FileCredentials(CredentialProvider):  # type: ignore[misc]
    """The user and secret in a file at the moment of connecting."""

    def __init__(self, credentials: ClientCredentials) -> None:
        self._credentials = credentials

    def get_credentials(self) -> tuple[str, ...]:
        try:
            login = self._credentials.login()
        except RequestError as error:
            raise RedisConnectionError(str(error)) from error
        return (login.user, login.secret) if login else ()

    async def get_credentials_async(self) -> tuple[str, ...]:
        return self.get_credentials()


class _TlsConnection(redis.asyncio.SSLConnection):  # type: ignore[misc]
    """A TLS connection with the files as they are at the moment of connecting."""

    def __init__(self, *, files: TlsFiles, **rest: Any) -> None:
        self._files = files
        super().__init__(**rest)

    def _connection_arguments(self) -> Mapping[str, Any]:
        try:
            return {**super()._connection_arguments(), "ssl": self._files.context()}
        except RequestError as error:
            raise RedisConnectionError(str(error)) from error


class _Pool(redis.asyncio.ConnectionPool):  # type: ignore[misc]
    """A pool without the library's metrics, and without a lock: nothing awaits while it changes."""

    async def get_connection(self, *_: Any, **__: Any) -> Any:
        """Return a connection that is connected and has no data of an earlier call."""
        connection = self.get_available_connection()
        try:
            await self.ensure_connection(connection)
        except BaseException:
            await self.release(connection)
            raise
        return connection

    async def release(self, connection: Any) -> None:
        """Take a connection back."""
        self._in_use_connections.remove(connection)
        if connection.should_reconnect():
            await connection.disconnect()
        self._available_connections.append(connection)


class CommandClient(redis.asyncio.Redis):  # type: ignore[misc]
    """A client without the library's retries, metrics and encoder written in Python.

    A command takes less than half of the interpreter's instructions.
    """

    async def execute_command(self, *command: Any, **options: Any) -> Any:
        """Send one command over a connection of the pool, and return its reply."""
        name, *values = command
        pool = self.connection_pool
        connection = await pool.get_connection()
        try:
            packed = hiredis.pack_command((*name.split(), *values))
            await connection.send_packed_command(packed)
            return await self.parse_response(connection, name, **options)
        except (RedisConnectionError, OSError, TimeoutError):
            await connection.disconnect(nowait=True)
            raise
        finally:
            await pool.release(connection)


def connection_pool(
    url: str, credentials: ClientCredentials, *, timeout_s: float
) -> redis.asyncio.ConnectionPool:
    """Return a pool of connections that retries no call; the caller sets the timeout of each.

    Raises RequestError for a malformed address, for TLS files with an address without TLS, and for
    an address that names Sentinels and no primary.
    """
    if credentials.tls and not url.startswith("rediss"):
        scheme = url.partition("://")[0]
        raise RequestError(
            f"--redis-ca-file or --redis-certificate-file is given, and --redis-url {scheme}:// "
            "has no TLS: write rediss://HOST:PORT, or rediss+sentinel://"
        )
    if uses_sentinels(url):
        return primary_pool(url, credentials, timeout_s=timeout_s, make_pool=_direct)
    return _direct(url, credentials, timeout_s)


def _direct(
    url: str, credentials: ClientCredentials, timeout_s: float
) -> redis.asyncio.ConnectionPool:
    try:
        pool = _Pool.from_url(
            url,
            protocol=2,
            socket_timeout=None,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            driver_info=_DRIVER_INFO,
            **(
                {"credential_provider": _FileCredentials(credentials)}
                if credentials.login_file
                else {}
            ),
        )
    except ValueError as error:
        raise RequestError(  # without the address: it may contain a secret
            "--redis-url is not an address of a Redis server: write redis://HOST:PORT/0, "
            "or rediss:// or redis+sentinel://"
        ) from error
    if credentials.tls:
        pool.connection_class = _TlsConnection
        pool.connection_kwargs["files"] = credentials.tls
    return pool
