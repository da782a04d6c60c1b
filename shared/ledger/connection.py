"""The connection to Redis or Valkey: calls the ledger's functions and reads its feed.

Only a binder's user may load the library of functions.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self, TypedDict, TypeVar, Unpack

import msgpack
import msgspec
from redis.exceptions import NoPermissionError, RedisError, ResponseError

from shared.credentials.logins import NO_CREDENTIALS, ClientCredentials
from shared.ledger.connection_pool import CommandClient, LedgerClock, connection_pool
from shared.ledger.function_library import FUNCTIONS, LIBRARY_PREFIX, library
from shared.ledger.server_errors import is_served, lacks_functions, translate
from shared.model.errors import UNDECODABLE, PermissionDeniedError

T = TypeVar("T")
P = TypeVar("P", bound="LedgerPart")

BATCH_SIZE = 64
"""Per call of a function: Redis runs nothing else meanwhile."""
TRY_WRITE_S = 1.0
"""The interval at which a write is tried after the server has refused a call."""
_unpack = msgspec.msgpack.Decoder().decode


def unpack(packed: bytes) -> Any:
    """Decode a reply; bytes that are no text become surrogates."""
    try:
        return _unpack(packed)
    except UNDECODABLE:
        return msgpack.unpackb(packed, unicode_errors="surrogateescape", strict_map_key=False)


class ConnectionOptions(TypedDict, total=False):
    credentials: ClientCredentials
    timeout_s: float
    feed_length: int
    detects_lost_writes: bool
    clock: LedgerClock | None


class LedgerConnection:
    """A pool of connections to one server, and the functions that it runs.

    With `detects_lost_writes`, which requires the right to write, a ledger that has lost what it
    confirmed to this caller is closed.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str,
        timeout_s: float = 5.0,
        feed_length: int = 10_000,
        credentials: ClientCredentials = NO_CREDENTIALS,
        detects_lost_writes: bool = False,
        clock: LedgerClock | None = None,
    ) -> None:
        self.prefix = prefix
        self.timeout_s = timeout_s
        self.feed_length = feed_length
        self.detects_lost_writes = detects_lost_writes
        self.clock = clock
        self.unready_reason: str | None = None
        self._refuses = False
        """The server refused a call and has accepted no write since."""
        self._tried_at = 0.0
        self._highest_version = 0
        # The timeouts are ours, around each call: the library's own may swallow a cancellation.
        self._redis = CommandClient.from_pool(
            connection_pool(url, credentials, timeout_s=timeout_s)
        )
        self._where = _without_password(url)
        self._hint = (
            ", and set --redis-certificate-file if it requires one"
            if url.startswith("rediss") and not credentials.tls.certificate
            else ""
        )
        self.library = library()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._redis.aclose()

    def observe_version(self, version: int) -> None:
        """A server that returns a lower version later has lost writes."""
        if version > self._highest_version and self.detects_lost_writes:
            self._highest_version = version

    async def run(
        self, function: str, *args: object, state: str = "ready", tail: bytes = b""
    ) -> Any:
        return unpack(await self.run_raw(function, *args, state=state, tail=tail))

    async def run_raw(
        self, function: str, *args: object, state: str = "ready", tail: bytes = b""
    ) -> Any:
        """Call a function and return its reply: bytes, or a list of them.

        `tail` may be stored unchanged. The ledger must be `ready`, or `open` (ready or being
        rebuilt), or in `any` state. Raises UnavailableError if it is not, or if the server does not
        respond or refuses to write. Calls are not retried.
        """
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._read_clock()
                answer = await self._call(function, args, state, tail)
        except (RedisError, OSError, TimeoutError) as error:
            raise await self._translated(error) from error
        await self._note_served()
        return answer

    async def _call(self, function: str, args: tuple[object, ...], state: str, tail: bytes) -> Any:
        packed: bytes = msgpack.packb(args, use_bin_type=False)
        name = self.library.full_name(function)
        sent = (0, self.prefix, packed, state, self.feed_length, tail, self._highest_version)
        reads_only = FUNCTIONS[function].reads_only
        call = self._redis.fcall_ro if reads_only else self._redis.fcall
        try:
            return await call(name, *sent)
        except ResponseError as error:
            if reads_only and str(error).startswith(("LOSTWRITES", "LOSTRECORDS")):
                await self._close_ledger(sent)
            if not lacks_functions(error):
                raise
            await self._load_library(error)
            return await call(name, *sent)

    async def _load_library(self, missing: ResponseError) -> None:
        """Raise `missing` if this user may not load the library."""
        try:
            await self._redis.function_load(self.library.text)
        except NoPermissionError:
            raise missing from None
        except ResponseError as error:
            # Another service has loaded it meanwhile.
            if "already exists" not in str(error):
                raise

    async def _close_ledger(self, sent: tuple[object, ...]) -> None:
        """Call a function that may write, which closes a ledger that has lost writes."""
        with contextlib.suppress(ResponseError):
            await self._redis.fcall(self.library.full_name("try_write"), *sent)

    async def library_names(self) -> list[str]:
        try:
            async with asyncio.timeout(self.timeout_s):
                listed = await self._redis.function_list(library=f"{LIBRARY_PREFIX}*")
        except (RedisError, OSError, TimeoutError) as error:
            raise await self._translated(error) from error
        return [_library_name(fields) for fields in listed]

    async def delete_library(self, name: str) -> None:
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._redis.function_delete(name)
        except ResponseError:  # another binder has deleted it
            return
        except (RedisError, OSError, TimeoutError) as error:
            raise await self._translated(error) from error

    async def _read_clock(self) -> None:
        if self.clock and self.clock.is_due:
            began_s = time.monotonic()
            seconds, micros = await self._redis.time()
            self.clock.set(seconds + micros / 1e6, began_s)

    async def read_feed(
        self, after: str, *, count: int, block_s: float
    ) -> list[tuple[str, Mapping[bytes, bytes]]]:
        block_ms = max(1, int(min(block_s, self.timeout_s / 2) * 1000))
        key = f"{self.prefix}feed"
        try:
            async with asyncio.timeout(self.timeout_s):
                streams = await self._redis.xread({key: after}, count=count, block=block_ms)
        except (RedisError, OSError, TimeoutError) as error:
            raise await self._translated(error) from error
        await self._note_served()
        entries = streams[0][1] if streams else []
        return [(entry.decode(), fields) for entry, fields in entries]

    async def _note_served(self) -> None:
        """A server that refuses writes still serves reads."""
        if self._refuses:
            if time.monotonic() < self._tried_at + TRY_WRITE_S:
                return
            self._tried_at = time.monotonic()
            self._refuses = not await self._accepts_writes()
        if not self._refuses:
            self.unready_reason = None

    async def _accepts_writes(self) -> bool:
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._call("try_write", (), "any", b"")
        except (RedisError, OSError, TimeoutError) as error:
            # A user without permission to write was refused a read.
            return isinstance(self._translate(error), PermissionDeniedError)
        return True

    async def _translated(self, error: Exception) -> Exception:
        translated = self._translate(error)
        if is_served(error, translated):
            await self._note_served()
            return translated
        self.unready_reason = str(translated)
        self._refuses |= isinstance(error, ResponseError)
        return translated

    def _translate(self, error: Exception) -> Exception:
        return translate(error, where=self._where, hint=self._hint, library=self.library)


class LedgerPart:
    def __init__(self, connection: LedgerConnection) -> None:
        self._connection = connection

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, url: str, *, prefix: str = "lh:", **options: Unpack[ConnectionOptions]
    ) -> AsyncIterator[Self]:
        """Connect with the first call. `options`: see `LedgerConnection`."""
        async with LedgerConnection(url, prefix=prefix, **options) as connection:
            yield cls(connection)

    def part(self, kind: type[P]) -> P:
        return kind(self._connection)

    def unready_reason(self) -> str | None:
        return self._connection.unready_reason


def in_batches(items: Sequence[T], size: int = BATCH_SIZE) -> list[Sequence[T]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def _library_name(fields: Sequence[Any]) -> str:
    """FUNCTION LIST has names and values in turn."""
    name = fields[fields.index(b"library_name") + 1]
    return str(name.decode())
