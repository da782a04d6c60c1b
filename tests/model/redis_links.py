"""A real valkey-server, and each process's link to it, which can delay and lose calls."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from shared.ledger.connection import LedgerConnection

PREFIX = "lh:"
FEED_WAIT_S = 4.0
"""A placer that the model does not have read the feed reads it after this, below its timeout."""


class RedisServer:
    """One server for many runs: emptied, saved and restored as a whole."""

    def __init__(self, url: str) -> None:
        self.client = redis.Redis.from_url(url, protocol=2)
        self.scripts: dict[str, tuple[str, str]] = {}
        """Shared by all connections: sources are read once."""
        self.saved: list[tuple[bytes, bytes]] | None = None
        self.calls = 0
        """Grows whenever something may have been written."""
        self.late_calls: list[Callable[[], Any]] = []
        """Calls that their sender has given up, and that reach the server later."""

    def reset(self) -> None:
        self.client.flushall()
        self.saved = None
        self.late_calls.clear()

    def flush(self) -> None:
        self.calls += 1
        self.client.flushall()

    def save(self) -> None:
        """Remember everything that is stored."""
        keys = self.client.keys("*")
        pipeline = self.client.pipeline(transaction=False)
        for key in keys:
            pipeline.dump(key)
        self.saved = list(zip(keys, pipeline.execute(), strict=True))

    def roll_back(self) -> None:
        """Return to what was remembered."""
        self.calls += 1
        pipeline = self.client.pipeline()
        pipeline.flushall()
        for key, value in self.saved or []:
            pipeline.restore(key, 0, value)
        pipeline.execute()

    def run_late_call(self) -> None:
        self.calls += 1
        with contextlib.suppress(RedisError):
            self.late_calls.pop(0)()

    def raw(self) -> Mapping[str, dict[bytes, bytes]]:
        """Return the stored hashes that the judge reads, as bytes."""
        names = ("ledger", "leases", "devices", "nodes", "waiting")
        pipeline = self.client.pipeline(transaction=False)
        for name in names:
            pipeline.hgetall(f"{PREFIX}{name}")
        return dict(zip(names, pipeline.execute(), strict=True))


class Link:
    """What one process uses in place of its Redis client."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.loses = ""
        """What becomes of the next call: `request` or `reply` is lost; empty: neither."""
        self.feed_wanted = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()

    @property
    def delayed(self) -> bool:
        return not self._open.is_set()

    def delay(self) -> None:
        """Delay all calls until `restore`; those given up meanwhile arrive late."""
        self._open.clear()

    def restore(self) -> None:
        self.loses = ""
        self._open.set()

    async def evalsha(self, sha: str, *sent: Any) -> Any:
        return await self._call(lambda: self.server.client.execute_command("EVALSHA", sha, *sent))

    async def eval(self, source: str, *sent: Any) -> Any:
        return await self._call(lambda: self.server.client.execute_command("EVAL", source, *sent))

    async def xread(self, streams: dict[str, str], *, count: int, block: int) -> Any:
        """Return what the feed has; if nothing, wait until the model wants it read again."""
        await self._open.wait()
        found = self.server.client.xread(streams, count=count)
        if not found:
            self.feed_wanted.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FEED_WAIT_S):
                    await self.feed_wanted.wait()
            found = self.server.client.xread(streams, count=count)
        return found

    async def aclose(self) -> None:
        """There is nothing to close."""

    async def _call(self, call: Callable[[], Any]) -> Any:
        if self.delayed:
            try:
                await self._open.wait()
            except asyncio.CancelledError:
                self.server.late_calls.append(call)
                raise
        loses, self.loses = self.loses, ""
        if loses == "request":
            raise RedisConnectionError("the connection broke before the request was sent")
        self.server.calls += 1
        answer = call()
        if loses == "reply":
            raise RedisConnectionError("the connection broke before the reply was received")
        return answer


class LinkedConnection(LedgerConnection):
    """The product's connection over a link."""

    def __init__(self, link: Link) -> None:
        super().__init__("unix:///unused", prefix=PREFIX, detects_lost_writes=True)
        self._redis = link
        self._scripts = link.server.scripts
