"""A primary, a replica and Sentinels that make the one of the other, on ports of their own."""

import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import redis.asyncio

from tests.support.servers.nats import free_port
from tests.support.servers.valkey import valkey_binary
from tests.support.waiting import until

NAME = "ledger"
DOWN_MS = 500


class Servers:
    """Processes of valkey-server by name: `first` and `second` keep data, the others watch them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports: dict[str, int] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.sentinels = ("watch-0", "watch-1", "watch-2")

    def start(self, name: str, *options: str, config: str = "") -> None:
        port = self.ports.setdefault(name, free_port())
        place = self.folder / name
        place.mkdir(exist_ok=True)
        (place / "conf").write_text(f"port {port}\nbind 127.0.0.1\ndir {place}\n{config}")
        self.processes[name] = subprocess.Popen(
            [valkey_binary(), str(place / "conf"), *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def signal(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def url(self, names: Sequence[str] | None = None) -> str:
        hosts = (f"127.0.0.1:{self.ports[name]}" for name in names or self.sentinels)
        return f"redis+sentinel://{','.join(hosts)}/{NAME}"

    async def part(self, name: str) -> None:
        """Close a primary's connections to its replicas."""
        async with redis.asyncio.Redis(port=self.ports[name]) as client:
            await client.execute_command("CLIENT", "KILL", "TYPE", "replica")

    async def until(self, name: str, section: str, line: str) -> None:
        """Wait until INFO of a server has a line."""
        async with redis.asyncio.Redis(port=self.ports[name], decode_responses=True) as client:

            async def info() -> set[str]:
                with suppress(OSError, redis.exceptions.ConnectionError):
                    info = dict(await client.execute_command("INFO", section))
                    return {f"{key}:{value}" for key, value in info.items()}
                return set()

            await until(info, lambda lines: line in lines)


@asynccontextmanager
async def sentinels() -> AsyncIterator[Servers]:
    """Start all of them; they know each other when this returns."""
    with tempfile.TemporaryDirectory(prefix="lh-sentinels-") as folder:
        servers = Servers(Path(folder))
        try:
            servers.start("first", config="save ''\n")
            servers.start(
                "second", config=f"save ''\nreplicaof 127.0.0.1 {servers.ports['first']}\n"
            )
            await servers.until("second", "replication", "master_link_status:up")
            for name in servers.sentinels:
                watched = f"sentinel monitor {NAME} 127.0.0.1 {servers.ports['first']} 2\n"
                patience = f"sentinel down-after-milliseconds {NAME} {DOWN_MS}\n"
                patience += f"sentinel failover-timeout {NAME} 5000\n"
                servers.start(name, "--sentinel", config=watched + patience)
            await _meet(servers)
            yield servers
        finally:
            servers.stop()


async def _meet(servers: Servers) -> None:
    for name in servers.sentinels:
        async with redis.asyncio.Redis(port=servers.ports[name], decode_responses=True) as client:

            async def known(client: redis.asyncio.Redis = client) -> tuple[int, int]:
                with suppress(OSError, redis.exceptions.ConnectionError):
                    master = (await client.sentinel_masters())[NAME]
                    return master["num-other-sentinels"], master["num-slaves"]
                return 0, 0

            await until(known, lambda counts: counts == (2, 1))
