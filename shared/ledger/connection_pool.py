"""The client of Redis or Valkey, its clock, and the primary that Sentinels name.

For each connection, credential files are read and Sentinels queried again. In
`redis+sentinel://HOST[:PORT],.../NAME[/DB]`, or `rediss+sentinel://` under TLS, NAME is that of
`sentinel monitor NAME ...`.
"""

import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import hiredis
import redis.asyncio
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool, SentinelManagedConnection
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.driver_info import DriverInfo
from redis.exceptions import ConnectionError as RedisConnectionError

from shared.credentials.logins import ClientCredentials
from shared.credentials.tls import TlsFiles
from shared.model.clock import SystemClock
from shared.model.errors import RequestError, UnavailableError

READ_EVERY_S = 10.0
"""The interval at which the server's time is read; between, the host counts monotonic seconds."""


LATEST_REPLIES = 3


class LedgerClock(SystemClock):
    def __init__(self) -> None:
        self._ahead_s: float | None = None
        self._read_at = -READ_EVERY_S
        self._replies_s: deque[float] = deque(maxlen=LATEST_REPLIES)

    @property
    def slowest_reply_s(self) -> float:
        """The longest of the latest times that the server took to reply to a query of its time."""
        return max(self._replies_s, default=0.0)

    @property
    def is_due(self) -> bool:
        return self._ahead_s is None or time.monotonic() >= self._read_at + READ_EVERY_S

    def set(self, server_s: float, began_s: float) -> None:
        self._read_at = time.monotonic()
        self._replies_s.append(self._read_at - began_s)
        self._ahead_s = server_s - (began_s + self._read_at) / 2

    def now(self) -> float:
        """Raises UnavailableError until the server has replied once."""
        if self._ahead_s is None:
            raise UnavailableError("the time of the Redis server is not known yet")
        return time.monotonic() + self._ahead_s


PORT = 26379
_SCHEME = re.compile(r"(rediss?)\+sentinel://")
_FORM = re.compile(r"(?P<hosts>[^/@]+)/(?P<name>[^/?]+)(?:/(?P<db>\d+))?")
PoolFactory = Callable[[str, ClientCredentials, float], ConnectionPool]


class _PrimaryPool(SentinelConnectionPool):  # type: ignore[misc]
    async def aclose(self) -> None:
        await super().aclose()
        await self.sentinel_manager.aclose()


def uses_sentinels(url: str) -> bool:
    return _SCHEME.match(url) is not None


def primary_pool(
    url: str, credentials: ClientCredentials, *, timeout_s: float, make_pool: PoolFactory
) -> ConnectionPool:
    """Sentinels get the same credentials, and are tried without if they refuse them.

    Raises RequestError for a malformed URL.
    """
    scheme, rest = url.split("+sentinel://", 1)
    form = _FORM.fullmatch(rest)
    if form is None:
        raise RequestError(
            f"--redis-url {scheme}+sentinel://... names no primary, or names a user: write "
            f"{scheme}+sentinel://HOST:{PORT},HOST:{PORT}/NAME, where NAME is that of "
            "`sentinel monitor`, and set the user with --redis-credentials"
        )
    hosts = [_with_port(host) for host in form["hosts"].split(",")]
    attempts = (
        [credentials, ClientCredentials(tls=credentials.tls)]
        if credentials.secret_file
        else [credentials]
    )
    limit_s = timeout_s / (2 * len(hosts))
    sentinels = Sentinel([])
    for attempt in attempts:
        for host in hosts:
            pool = make_pool(f"{scheme}://{host}", attempt, limit_s)
            pool.connection_kwargs["socket_timeout"] = limit_s
            sentinels.sentinels.append(Redis.from_pool(pool))
    template = make_pool(f"{scheme}://primary/{form['db'] or 0}", credentials, timeout_s)
    excluded = ("host", "port")
    return _PrimaryPool(
        form["name"],
        sentinels,
        connection_class=type(
            "_PrimaryConnection", (SentinelManagedConnection, template.connection_class), {}
        ),
        **{
            name: value
            for name, value in template.connection_kwargs.items()
            if name not in excluded
        },
    )


def _with_port(host: str) -> str:
    return host if re.search(r":\d+$", host) else f"{host}:{PORT}"


_DRIVER_INFO = DriverInfo(lib_version=redis.__version__)
"""Without a version, the library reads its metadata for each connection."""


class _FileCredentials(CredentialProvider):  # type: ignore[misc]
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
    def __init__(self, *, files: TlsFiles, **rest: Any) -> None:
        self._files = files
        super().__init__(**rest)

    def _connection_arguments(self) -> Mapping[str, Any]:
        try:
            return {**super()._connection_arguments(), "ssl": self._files.context()}
        except RequestError as error:
            raise RedisConnectionError(str(error)) from error


class _Pool(redis.asyncio.ConnectionPool):  # type: ignore[misc]
    """Without the library's metrics, and without a lock: nothing awaits while it changes."""

    async def get_connection(self, *_: Any, **__: Any) -> Any:
        connection = self.get_available_connection()
        try:
            await self.ensure_connection(connection)
        except BaseException:
            await self.release(connection)
            raise
        return connection

    async def release(self, connection: Any) -> None:
        self._in_use_connections.remove(connection)
        if connection.should_reconnect():
            await connection.disconnect()
        self._available_connections.append(connection)


class CommandClient(redis.asyncio.Redis):  # type: ignore[misc]
    """Without the library's retries, metrics and encoder, which cost half of the time."""

    async def execute_command(self, *command: Any, **options: Any) -> Any:
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
    """Return a pool that retries no call; the caller sets the timeout of each.

    Raises RequestError for a malformed address, and for TLS files with an address without TLS.
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
