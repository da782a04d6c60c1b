"""A proxy between a kubelet and an agent's device plugins, with a socket for each of theirs.

The agent has a directory of its own: a socket of the kubelet appears there, and each socket of the
agent's appears in the kubelet's directory. Where one is replaced or removed, so is its twin.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.campaign.stack.tcp_proxy import SocketProxy

KUBELET = "kubelet.sock"
CHECKPOINT = "kubelet_internal_checkpoint"
PLUGINS = "leasehold-*.sock"
LOOK_S = 0.05

Identity = tuple[int, int]


def _identity(path: Path) -> Identity | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns


class _Twin(SocketProxy):
    """One proxied socket, and the identities of both files."""

    def __init__(
        self, path: Path, upstream: Path, before_dial: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(path, upstream)
        self.path = path
        self.upstream_path = upstream
        self.upstream_is = _identity(upstream)
        self.is_: Identity | None = None
        self._before_dial = before_dial

    async def start(self) -> None:
        """Listen at the path."""
        self.path.unlink(missing_ok=True)
        await super().start()
        self.is_ = _identity(self.path)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        await self._before_dial()
        return await super()._connect()

    def remove(self) -> None:
        """Take no more connections; those that are open live on, as with a real socket."""
        if self._server is not None:
            self._server.close()
        if _identity(self.path) == self.is_:
            self.path.unlink(missing_ok=True)


class PluginProxy:
    """Between one kubelet's directory of device plugins and that of its agent."""

    def __init__(self, of_agent: Path, of_kubelet: Path) -> None:
        self.of_agent = of_agent
        self.of_kubelet = of_kubelet
        self._twins: dict[str, _Twin] = {}
        self._old: list[_Twin] = []
        self._way = ""
        self._delay_s = 0.0
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Mirror the sockets from now on."""
        self.of_agent.mkdir(parents=True, exist_ok=True)
        (self.of_agent / CHECKPOINT).symlink_to(self.of_kubelet / CHECKPOINT)
        self._task = asyncio.create_task(self._mirror_forever())

    async def close(self) -> None:
        """End all connections."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await asyncio.gather(*(twin.close() for twin in self._all()))

    def spoil(self, way: str, delay_s: float = 0.0) -> None:
        """Begin a fault on all sockets: cut, slow or half-open."""
        self._way = way
        self._delay_s = delay_s
        for twin in self._all():
            twin.spoil(way, delay_s)

    def heal(self) -> None:
        """End it."""
        self._way = ""
        self._delay_s = 0.0
        for twin in self._all():
            twin.heal()

    def _all(self) -> tuple[_Twin, ...]:
        return (*self._twins.values(), *self._old)

    async def _mirror_forever(self) -> None:
        while True:
            await self._mirror()
            await asyncio.sleep(LOOK_S)

    async def _mirror(self) -> None:
        """Make both directories agree; what was removed in one of them goes in the other, too."""
        async with self._lock:
            for name, twin in list(self._twins.items()):
                is_upstream = twin.upstream_is == _identity(twin.upstream_path)
                if is_upstream and twin.is_ == _identity(twin.path):
                    continue
                if is_upstream and name != KUBELET:  # the kubelet has emptied its directory
                    twin.upstream_path.unlink(missing_ok=True)
                twin.remove()
                self._old = [earlier for earlier in self._old if earlier.is_used] + [twin]
                del self._twins[name]
            if (self.of_kubelet / KUBELET).exists():
                await self._add(KUBELET, self.of_agent, self.of_kubelet)
            for plugin in self.of_agent.glob(PLUGINS):
                await self._add(plugin.name, self.of_kubelet, self.of_agent)

    async def _add(self, name: str, listening: Path, upstream: Path) -> None:
        if name in self._twins:
            return
        # A plugin registers as soon as it listens: its socket must be there before the request is.
        before_dial = self._mirror if name == KUBELET else _nothing
        twin = _Twin(listening / name, upstream / name, before_dial)
        if twin.upstream_is is None:
            return
        if self._way:
            twin.spoil(self._way, self._delay_s)
        self._twins[name] = twin
        await twin.start()


async def _nothing() -> None:
    """Before a connection to a plugin nothing is to be done."""
