"""What TLS costs at NATS: `python -m tests.benchmarks.tls`.

Two nats-servers with users, one under TLS, are spoken to by turns with the production client: a
request and its reply, one after the other. Printed are the medians of the rounds.
"""

import asyncio
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

from services.cli import credentials
from shared.credentials.logins import ClientCredentials
from shared.credentials.tls import TlsFiles
from shared.nats.connection import connected
from tests.support.servers.nats import NatsServer

ROUNDS = 5
REQUESTS = 1000


async def round_trip_us(client):
    """Return the median of requests' round trips."""
    took = []
    for _ in range(REQUESTS):
        began = time.perf_counter()
        await client.request("echo", b"x", timeout=10)
        took.append(time.perf_counter() - began)
    return statistics.median(took) * 1e6


async def served(stack, folder, *, tls):
    """Start a server and return a client of it that also replies."""
    written = credentials.write(folder, [], names=["127.0.0.1"] if tls else [])
    secret = written.nats("binder").read_text().strip().partition(":")[2]
    users = f"authorization {{ users: [{{ user: binder, password: '{secret}' }}] }}\n"
    server = NatsServer((written.certificate, written.key) if tls else None, more=users)
    await server.start()
    stack.callback(server.close)
    files = TlsFiles(ca=written.authority if tls else None)
    login = ClientCredentials(login_file=written.nats("binder"), tls=files)
    client = await connected(server.url, name="bench", credentials=login, patience_s=30)
    stack.push_async_callback(client.close)

    async def reply(message):
        await message.respond(b"y")

    await client.subscribe("echo", cb=reply)
    return client


async def main():
    """Measure by turns, and print."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lh-bench-")))
        clients = {
            name: await served(stack, folder / name, tls=name == "tls") for name in ("plain", "tls")
        }
        trips = {name: [] for name in clients}
        for _ in range(ROUNDS):
            for name, client in clients.items():
                trips[name].append(await round_trip_us(client))
        for name, took in trips.items():
            print(f"{name}: round trip {statistics.median(took):.0f} us")


if __name__ == "__main__":
    asyncio.run(main())
