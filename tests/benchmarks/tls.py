"""What TLS costs at NATS: `python -m tests.benchmarks.tls`.

Two nats-servers with users, one under TLS, are spoken to by turns with the production client: a
question and its answer, one after the other. Printed are the medians of the rounds.
"""

import asyncio
import statistics
import subprocess
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

from nats.aio.client import Client

from services.cli import credentials
from shared.credentials.logins import ClientCredentials
from shared.credentials.tls import TlsFiles
from shared.nats.connection import connected
from tests.support.servers.nats import free_port, nats_binary

ROUNDS, QUESTIONS = 5, 1000


async def questions(client: Client) -> float:
    """Return the median of questions' round trips, microseconds."""
    took = []
    for _ in range(QUESTIONS):
        began = time.perf_counter()
        await client.request("echo", b"x", timeout=10)
        took.append(time.perf_counter() - began)
    return statistics.median(took) * 1e6


async def served(stack: AsyncExitStack, folder: Path, *, tls: bool) -> Client:
    """Start a server and return a client of it that also answers."""
    written = credentials.write(folder / "credentials", [], names=["127.0.0.1"] if tls else [])
    secret = written.nats("binder").read_text().strip().partition(":")[2]
    config = folder / "nats.conf"
    cover = f"tls {{ cert_file: '{written.certificate}', key_file: '{written.key}' }}\n"
    config.write_text(
        (cover if tls else "")
        + f"authorization {{ users: [{{ user: binder, password: '{secret}' }}] }}\n"
    )
    port = free_port()
    command = [nats_binary(), "-a", "127.0.0.1", "-p", str(port), "--config", str(config)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(server.kill)
    keys = ClientCredentials(
        login_file=written.nats("binder"), tls=TlsFiles(ca=written.authority if tls else None)
    )
    client = await connected(
        f"nats://127.0.0.1:{port}", name="bench", credentials=keys, patience_s=30
    )
    stack.push_async_callback(client.close)

    async def answer(message: object) -> None:
        await message.respond(b"y")  # type: ignore[attr-defined]

    await client.subscribe("echo", cb=answer)
    return client


async def main() -> None:
    """Measure by turns, and print."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lh-bench-")))
        clients = {}
        for name in ("plain", "tls"):
            (folder / name).mkdir()
            clients[name] = await served(stack, folder / name, tls=name == "tls")
        trips: dict[str, list[float]] = {name: [] for name in clients}
        for _ in range(ROUNDS):
            for name, client in clients.items():
                trips[name].append(await questions(client))
        for name in clients:
            print(f"{name}: round trip {statistics.median(trips[name]):.0f} us")


if __name__ == "__main__":
    asyncio.run(main())
