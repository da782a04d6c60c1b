"""The connection to Redis or Valkey: runs the ledger's scripts, reads its feed, sorts its errors.

Nothing is tried twice here, except that a server which has forgotten a script is given it again.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar

import msgpack
import msgspec
import redis.asyncio
from redis.exceptions import (
    AuthenticationError,
    MasterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from shared.credentials.logins import NO_CREDENTIALS, ClientCredentials
from shared.credentials.tls import tls_fault
from shared.ledger.connection_pool import pool_of
from shared.ledger.script_sources import script_source
from shared.model.errors import ConflictError, PermissionDeniedError, RequestError, UnavailableError

T = TypeVar("T")

GROUP = 64
"""Things per script call: enough to be cheap, few enough to share Redis."""
_AWAY = (MasterDownError, OutOfMemoryError, ReadOnlyError)
"""Answers after which the same call may succeed later."""
_THERE = ("NOTREADY", "FORMAT", "LOSTWRITES")
"""How the scripts say that the server is there, and its ledger cannot be used."""
unpacked = msgspec.msgpack.Decoder().decode
"""Reads what a script has packed."""


class LedgerConnection:
    """A pool of connections to one server, and the scripts it runs."""

    def __init__(
        self,
        url: str,
        *,
        prefix: str,
        timeout_s: float = 5.0,
        feed_length: int = 10_000,
        keys: ClientCredentials = NO_CREDENTIALS,
        is_witness: bool = False,
    ) -> None:
        self.prefix = prefix
        self.timeout_s = timeout_s
        self.feed_length = feed_length
        self.is_witness = is_witness
        self.trouble: str | None = None
        """Why the server did not serve the last call; None: it did, or nobody has called yet."""
        self._heard = 0
        # Time limits are ours, around each call: the library's own may swallow a cancellation.
        self._redis = redis.asyncio.Redis.from_pool(pool_of(url, keys, timeout_s=timeout_s))
        self._where = _without_password(url)
        self._hint = (
            ", and give --redis-certificate-file if it asks for one"
            if url.startswith("rediss") and not keys.tls.certificate
            else ""
        )
        self._loaded: dict[str, tuple[str, str]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._redis.aclose()

    def hear(self, version: int) -> None:
        """Remember what the server has answered: one that knows less later has lost writes."""
        if version > self._heard and self.is_witness:
            self._heard = version

    async def run(self, script: str, *args: object, state: str = "ready", tail: bytes = b"") -> Any:
        """Run a script and return its answer, as `run_raw` does, but unpacked."""
        return unpacked(await self.run_raw(script, *args, state=state, tail=tail))

    async def run_raw(
        self, script: str, *args: object, state: str = "ready", tail: bytes = b""
    ) -> Any:
        """Run a script and return its answer: bytes, or a list of them.

        `tail` is what the script may store as it comes. The ledger must be `ready`, or `open`
        (ready or being rebuilt); `any` does not ask. Raises UnavailableError if it is not, or if
        the server does not answer or refuses to write.
        """
        sha, source = self._script(script)
        packed: bytes = msgpack.packb(args)
        sent = (0, self.prefix, packed, state, self.feed_length, tail, self._heard)
        try:
            async with asyncio.timeout(self.timeout_s):
                try:
                    answer = await self._redis.evalsha(sha, *sent)
                except NoScriptError:
                    answer = await self._redis.eval(source, *sent)
        except (RedisError, OSError, TimeoutError) as error:
            raise self._translated(error) from error
        self.trouble = None
        return answer

    async def read_feed(
        self, after: int, *, count: int, block_s: float
    ) -> list[tuple[int, Mapping[bytes, bytes]]]:
        """Return the entries after number `after`; wait up to `block_s` for the first."""
        block_ms = max(1, int(min(block_s, self.timeout_s / 2) * 1000))
        key = f"{self.prefix}feed"
        try:
            async with asyncio.timeout(self.timeout_s):
                found = await self._redis.xread({key: f"{after}-0"}, count=count, block=block_ms)
        except (RedisError, OSError, TimeoutError) as error:
            raise self._translated(error) from error
        self.trouble = None
        entries = found[0][1] if found else []
        return [(int(number.partition(b"-")[0]), fields) for number, fields in entries]

    def _script(self, name: str) -> tuple[str, str]:
        if name not in self._loaded:
            source = script_source(name)
            sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
            self._loaded[name] = (sha, source)
        return self._loaded[name]

    def _translated(self, error: Exception) -> Exception:
        translated = self._sorted(error)
        is_there = str(error).startswith(_THERE) or not isinstance(translated, UnavailableError)
        self.trouble = None if is_there else str(translated)
        return translated

    def _sorted(self, error: Exception) -> Exception:
        said, untranslated = str(error) or type(error).__name__, error
        if shut := _shut(error, said):
            return UnavailableError(f"the ledger at {self._where}{shut}")
        if _lacks_right(error, said):
            return PermissionDeniedError(
                f"the ledger at {self._where} refuses us: {said}; compare --redis-credentials with "
                "the server's users, both of which `leasehold doors --out DIR` writes"
            )
        if isinstance(error, ResponseError):
            if said.startswith(_THERE):
                return UnavailableError(f"the ledger at {self._where} {_not_ours(said)}")
            if said.startswith("STALETOKEN"):
                return ConflictError("another rebuild of the ledger has begun since")
            if not isinstance(error, _AWAY) and not said.startswith("NOREPLICAS"):
                return untranslated
        return UnavailableError(
            f"the ledger at {self._where} did not take the call: {said}; "
            f"check that the server runs, is the primary and has memory{self._hint}"
        )


class LedgerStore:
    """What is read and written with scripts over one connection."""

    def __init__(self, connection: LedgerConnection) -> None:
        self._connection = connection

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, url: str, *, prefix: str = "lh:", keys: ClientCredentials = NO_CREDENTIALS
    ) -> AsyncIterator[Self]:
        """Open what belongs to the ledger with this prefix; connects when used."""
        async with LedgerConnection(url, prefix=prefix, keys=keys) as connection:
            yield cls(connection)

    def trouble(self) -> str | None:
        """Say why the server did not serve the last call, or None."""
        return self._connection.trouble


def _not_ours(said: str) -> str:
    """Say why a ledger is not served: the scripts' word for it, its format and theirs."""
    word, *formats = said.split()
    if word == "LOSTWRITES":
        return (
            f"has lost writes, {formats[0]} versions of what it answered before (a server that was "
            "behind took over, or an older file was loaded): it is closed, and being rebuilt by a "
            "binder"
        )
    if word == "FORMAT":
        stored, ours = formats
        return (
            f"has format {stored}, which a newer version writes; this program writes format {ours} "
            "and leaves it alone: run the newer version, or see Upgrades in docs/operations.md"
        )
    if formats:
        stored, ours = formats
        return (
            f"has format {stored} and is being rebuilt in format {ours}; a binder of this version "
            "does it as soon as it has the list of pods, then the same call succeeds"
        )
    return (
        "is being rebuilt; a binder does it as soon as it has the list of pods, then the same call "
        "succeeds"
    )


def _shut(error: Exception, said: str) -> str:
    """Say what keeps us from being let in; empty: nothing does."""
    if fault := tls_fault(error, flag="--redis"):
        return f": {fault}"
    if isinstance(error.__cause__, RequestError):
        return f" was not asked: {said}"
    if said.startswith("DENIED"):
        return (
            " takes nobody from another machine, with or without a secret, because it runs in "
            "protected mode: start it with --protected-mode no; users and secrets keep it shut"
        )
    return ""


def _lacks_right(error: Exception, said: str) -> bool:
    """Tell whether the server knows us too little for what we asked."""
    refused = AuthenticationError | NoPermissionError
    known = isinstance(error, refused) or isinstance(error.__cause__, refused)
    return known or "ACL failure" in said


def in_groups(items: Sequence[T], size: int = GROUP) -> list[Sequence[T]]:
    """Cut items into pieces of at most `size`."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def _without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
