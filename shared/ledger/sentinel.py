"""The primary among replicas, as Sentinels know it: asked for at each new connection.

`redis+sentinel://HOST[:PORT],HOST[:PORT],.../NAME[/DB]`, `rediss+sentinel://` under TLS: NAME is
what Sentinels call the primary (`sentinel monitor NAME ...`). A primary that was demoted answers
READONLY, and its connections are closed; a hung one is given up with the call's time limit.
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
Pools = Callable[[str, ClientCredentials, float], ConnectionPool]
"""Makes a pool for one server: its URL, what it is shown, seconds to connect."""


class _Primary(SentinelConnectionPool):  # type: ignore[misc]
    """Connections to whatever is the primary; closes those to the Sentinels as well."""

    async def aclose(self) -> None:
        await super().aclose()
        await self.sentinel_manager.aclose()


def is_by_sentinels(url: str) -> bool:
    """Whether Sentinels are to be asked where the primary is."""
    return _SCHEME.match(url) is not None


def primary_pool(
    url: str, credentials: ClientCredentials, *, timeout_s: float, pools: Pools
) -> ConnectionPool:
    """Return a pool of connections to the primary; `pools` makes one for a server's URL.

    Sentinels are shown the same `keys`; those that do not know us are asked as nobody. One that
    hangs is passed over in time to ask the others. Raises RequestError for an URL of another form.
    """
    scheme, rest = url.split("+sentinel://", 1)
    form = _FORM.fullmatch(rest)
    if form is None:
        raise RequestError(
            f"--redis-url {scheme}+sentinel://... names no primary, or a user: write "
            f"{scheme}+sentinel://HOST:{PORT},HOST:{PORT}/NAME, where NAME is that of "
            "`sentinel monitor`, and give the user with --redis-credentials"
        )
    hosts = [_with_port(host) for host in form["hosts"].split(",")]
    asked_as = (
        [credentials, ClientCredentials(tls=credentials.tls)]
        if credentials.shown
        else [credentials]
    )
    limit_s = timeout_s / (2 * len(hosts))
    sentinels = Sentinel([])
    for who in asked_as:
        for host in hosts:
            pool = pools(f"{scheme}://{host}", who, limit_s)
            pool.connection_kwargs["socket_timeout"] = limit_s
            sentinels.sentinels.append(Redis.from_pool(pool))
    like = pools(f"{scheme}://primary/{form['db'] or 0}", credentials, timeout_s)
    unlike = ("host", "port")
    return _Primary(
        form["name"],
        sentinels,
        connection_class=type("_ToPrimary", (SentinelManagedConnection, like.connection_class), {}),
        **{name: value for name, value in like.connection_kwargs.items() if name not in unlike},
    )


def _with_port(host: str) -> str:
    return host if re.search(r":\d+$", host) else f"{host}:{PORT}"
