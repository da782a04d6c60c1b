"""The primary among replicas, looked up at the Sentinels for each new connection.

`redis+sentinel://HOST[:PORT],HOST[:PORT],.../NAME[/DB]`, `rediss+sentinel://` under TLS: NAME is
the Sentinels' name of the primary (`sentinel monitor NAME ...`). A demoted primary answers
READONLY, and its connections are closed; one that hangs is left when the call's timeout ends.
"""

import re
from collections.abc import Callable

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool, SentinelManagedConnection

from shared.credentials.logins import ClientCredentials
from shared.model.errors import RequestError

PORT = 26379
_SCHEME = re.compile(r"(rediss?)\+sentinel://")
_FORM = re.compile(r"(?P<hosts>[^/@]+)/(?P<name>[^/?]+)(?:/(?P<db>\d+))?")
PoolFactory = Callable[[str, ClientCredentials, float], ConnectionPool]
"""Makes a pool for one server: its URL, our credentials, and seconds to connect."""


class _PrimaryPool(SentinelConnectionPool):  # type: ignore[misc]
    """Connections to the current primary; closes those to the Sentinels, too."""

    async def aclose(self) -> None:
        await super().aclose()
        await self.sentinel_manager.aclose()


def uses_sentinels(url: str) -> bool:
    """Whether the URL names Sentinels."""
    return _SCHEME.match(url) is not None


def primary_pool(
    url: str, credentials: ClientCredentials, *, timeout_s: float, make_pool: PoolFactory
) -> ConnectionPool:
    """Return a pool of connections to the primary; `make_pool` makes one for a server.

    Sentinels get the same credentials; those that refuse them are tried without. One that hangs is
    passed over in time to try the others. Raises RequestError for a malformed URL.
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
