"""A real valkey-server, and each process's link to it, which can delay and lose calls."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import hiredis
from redis._parsers import BaseParser
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from shared.ledger.connection import LedgerConnection
from shared.ledger.function_library import Library, bundled, modules
from tests.model.virtual_time import ActorClock

PREFIX = "lh:"
BESIDE = "lh-preemption:"
"""Prefix of what a rebuild of the ledger keeps."""
LOCK = "call('SET', lock_key(pod), token, 'NX', 'PX', ttl_ms)"
MODEL_LOCK = """
    local lock = lock_key(pod)
    if server.now_in_ms() >= tonumber(call('GET', lock .. '.end') or 0) then call('DEL', lock) end
    if not call('SET', lock, token, 'NX') then return encode(false) end
    call('SET', lock .. '.end', server.now_in_ms() + ttl_ms)
    return encode(true)"""
IS_LOCKED = "call('GET', lock_key(pod)) ~= token"
MODEL_IS_LOCKED = (
    f"({IS_LOCKED} or server.now_in_ms() >= tonumber(call('GET', lock_key(pod) .. '.end')))"
)
EDITS = [
    ("return call('TIME')", "return {M.argv[7], M.argv[8]}"),
    (f"return encode({LOCK} and true or false)", MODEL_LOCK),
    (IS_LOCKED, MODEL_IS_LOCKED),
    (
        "leader ~= name then",
        "leader ~= name and server.argv[7] * 1000 < tonumber(call('GET', key .. '.led')) then",
    ),
    (
        "call('SET', key, name, 'PX', ttl_ms)",
        "call('MSET', key, name, key .. '.led', server.argv[7] * 1000 + ttl_ms)",
    ),
]
"""What is replaced in the ledger's modules: they read the time of the model, by which locks expire,
too; mutations add to this."""
FEED_WAIT_S = 4.0
"""A placer that the model does not have read the feed reads it after this, below its timeout."""


class Wire:
    """A blocking connection: most of the time of a run is spent on calls, and this one is short."""

    def __init__(self, url: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(url.removeprefix("unix://"))
        self._reader = hiredis.Reader(replyError=BaseParser.parse_error)

    def call(self, *command: Any) -> Any:
        """Send one command and return its reply. Raises RedisError if the server refuses it."""
        (reply,) = self.call_all([command])
        if isinstance(reply, RedisError):
            raise reply
        return reply

    def call_all(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send commands at once, and return their replies, errors among them."""
        self._socket.sendall(b"".join(hiredis.pack_command(command) for command in commands))
        replies: list[Any] = []
        while len(replies) < len(commands):
            reply = self._reader.gets()
            if reply is not False:
                replies.append(reply)
            elif received := self._socket.recv(65536):
                self._reader.feed(received)
            else:
                raise EOFError("the server closed the connection")
        return replies

    def close(self) -> None:
        self._socket.close()


class RedisServer:
    """One server for many runs: emptied, saved and restored as a whole."""

    clock: ActorClock
    """The time that the ledger's functions read; each world sets its own."""

    def __init__(self, url: str) -> None:
        self.wire = Wire(url)
        self._libraries: dict[tuple[tuple[str, str], ...], Library] = {}
        """Those that the server has, by their edits."""
        self.saved: list[tuple[bytes, bytes]] | None = None
        self.newest_version = 0
        """That was noted; 0 if no service may know it any more."""
        self.calls = 0
        """Grows whenever something may have been written."""
        self.late_calls: list[Callable[[], Any]] = []
        """Calls that their sender has given up, and that reach the server later."""

    def reset(self) -> None:
        self.flush()
        self.saved = None
        self.newest_version = 0
        self.late_calls.clear()

    def flush(self) -> None:
        self.calls += 1
        self.wire.call("FLUSHDB", "SYNC")

    def save(self) -> None:
        """Remember everything that is stored."""
        keys = self.wire.call("KEYS", "*")
        self.saved = list(
            zip(keys, self.wire.call_all([("DUMP", key) for key in keys]), strict=True)
        )

    def roll_back(self) -> None:
        """Return to what was remembered."""
        self.flush()
        self.wire.call_all([("RESTORE", key, 0, value) for key, value in self.saved or []])

    def note_version(self) -> None:
        """Remember the newest version before it is lost."""
        version = int(self.wire.call("HGET", f"{PREFIX}ledger", "version") or 0)
        self.newest_version = max(self.newest_version, version)

    def library(self) -> Library:
        """Return the library with all edits. The server has it, so that no run has to send it."""
        edits = tuple(EDITS)
        if edits not in self._libraries:
            self._libraries[edits] = edited = bundled(dict(map(_edited, modules().items())))
            self.wire.call("FUNCTION", "LOAD", "REPLACE", edited.text)
        return self._libraries[edits]

    def call(self, command: str, function: str, *sent: Any) -> Any:
        seconds, fraction = divmod(self.clock.now(), 1)
        return self.wire.call(command, function, *sent, int(seconds), int(fraction * 1e6))

    def run_late_call(self) -> None:
        self.calls += 1
        with contextlib.suppress(RedisError):
            self.late_calls.pop(0)()

    def raw(self) -> Mapping[str, dict[bytes, bytes]]:
        """Return what is stored and the judge reads, as bytes."""
        names = (
            "ledger",
            "leases",
            "devices",
            "nodes",
            "waiting",
            "claims",
            "starts",
            "facts:a",
            "facts:b",
        )
        calls: list[tuple[object, ...]] = [("HGETALL", f"{PREFIX}{name}") for name in names]
        calls.append(("ZRANGE", f"{PREFIX}gone", 0, -1, "WITHSCORES"))
        calls.append(("HGETALL", f"{BESIDE}preemptions"))
        replies = self.wire.call_all(calls)
        keys = (*names, "gone", "preemptions")
        return {name: _pairs(flat) for name, flat in zip(keys, replies, strict=True)}

    def leader(self, service: str) -> str:
        """Return the name of the replica of a service that leads."""
        return (self.wire.call("GET", f"{BESIDE}leader:{service}") or b"").decode()

    def read_feed(self, key: str, after: str, count: int) -> list[Any]:
        """Return what a stream has after an entry, in the form of the asynchronous client."""
        streams = self.wire.call("XREAD", "COUNT", count, "STREAMS", key, after) or []
        return [[name, [(entry, _pairs(flat)) for entry, flat in all_]] for name, all_ in streams]


class Link:
    """What one process uses in place of its Redis client."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.loses = ""
        """What becomes of one call: its `request` or `reply` is lost, or neither."""
        self.spared_calls = 0
        """Calls that are neither delayed nor lost, before one that is."""
        self.feed_wanted = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()

    @property
    def delayed(self) -> bool:
        return not self._open.is_set()

    def delay(self) -> None:
        """Delay calls until `restore`; those given up meanwhile arrive late."""
        self._open.clear()

    def restore(self) -> None:
        self.loses = ""
        self.spared_calls = 0
        self._open.set()

    async def fcall(self, function: str, *sent: Any) -> Any:
        return await self._call(lambda: self.server.call("FCALL", function, *sent))

    async def fcall_ro(self, function: str, *sent: Any) -> Any:
        return await self._call(lambda: self.server.call("FCALL_RO", function, *sent))

    async def xread(self, streams: dict[str, str], *, count: int, block: int) -> Any:
        """Return what the feed has; if nothing, wait until the model wants it read again."""
        await self._open.wait()
        ((key, after),) = streams.items()
        entries = self.server.read_feed(key, after, count)
        if not entries:
            self.feed_wanted.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FEED_WAIT_S):
                    await self.feed_wanted.wait()
            entries = self.server.read_feed(key, after, count)
        return entries

    async def aclose(self) -> None:
        """There is nothing to close."""

    async def _call(self, call: Callable[[], Any]) -> Any:
        if self.spared_calls and (self.delayed or self.loses):
            self.spared_calls -= 1
            self.server.calls += 1
            return call()
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
        self.library = link.server.library()

    async def _note_served(self) -> None:
        """The server refuses no writes: it need not be tried again after some real time."""


def _edited(module: tuple[str, str]) -> tuple[str, str]:
    name, text = module
    for before, after in EDITS:
        text = text.replace(before, after)
    return name, text


def _pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))
