"""The messages of one pod without Leasehold: `python -m tests.benchmarks.pace --bare`.

Three processes exchange what watcher, placer and binder exchange (decision 60), through the same
libraries: watch line, message, script, message, script, message, Binding, Event. They decode the
pod's metadata, decide nothing, and scripts only write. What they cost is what the libraries and the
kernel cost.
"""

import argparse
import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import msgspec
import nats
import redis.asyncio
import uvloop
from nats.aio.client import Client
from nats.aio.msg import Msg

SCRIPT = """
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', 1000, '*', 'd', ARGV[2])
"""
KEYS = ("bare:leases", "bare:feed")
AT_ONCE = 64
PARALLEL_REQUESTS = 16
LEASE = "x" * 300
"""As much as a lease adds to a message."""
ANNOTATIONS = {"leasehold.dev/lease": "x" * 600}
EVENT = msgspec.json.encode({"reason": "Scheduled", "message": "x" * 300})

BarePod = tuple[str, str, str, str]
"""Namespace, name, uid, and as many bytes as a lease."""
Handler = Callable[[list[BarePod]], Awaitable[None]]


class Metadata(msgspec.Struct):
    namespace: str
    name: str
    uid: str


class WatchedPod(msgspec.Struct):
    metadata: Metadata


class WatchLine(msgspec.Struct):
    type: str
    object: WatchedPod


async def watch(api: str, bus: Client) -> None:
    decode = msgspec.json.Decoder(WatchLine).decode
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout()) as session:
        response = await session.get(f"{api}/api/v1/pods?watch=true", read_bufsize=1 << 20)
        print("ready", flush=True)
        rest = b""
        while data := await response.content.readany():
            *lines, rest = (rest + data).split(b"\n")
            found = [decode(line) for line in lines if line.strip()]
            pods = [
                (each.namespace, each.name, each.uid, LEASE)
                for each in (line.object.metadata for line in found if line.type == "ADDED")
            ]
            if pods:
                await bus.publish("bare.queued", encode(pods))


async def place(bus: Client, ledger: "redis.asyncio.Redis") -> None:
    script = ledger.register_script(SCRIPT)

    async def handle(pods: list[BarePod]) -> None:
        for first in range(0, len(pods), AT_ONCE):
            some = pods[first : first + AT_ONCE]
            await script(keys=KEYS, args=[some[0][2], encode(some)])
            await bus.publish("bare.chosen", encode(some))

    await receive(bus, "bare.queued", handle)


async def bind(api: str, bus: Client, ledger: "redis.asyncio.Redis") -> None:
    script, free = ledger.register_script(SCRIPT), asyncio.Semaphore(PARALLEL_REQUESTS)
    async with (
        aiohttp.ClientSession(
            cookie_jar=aiohttp.DummyCookieJar(), connector=aiohttp.TCPConnector(limit=32)
        ) as session,
        asyncio.TaskGroup() as tasks,
    ):

        async def post(path: str, body: bytes) -> None:
            async with free, session.post(f"{api}/api/v1/namespaces/{path}", data=body) as response:
                await response.read()

        async def bind_pod(namespace: str, name: str) -> None:
            body = {"metadata": {"annotations": ANNOTATIONS}, "target": {"name": "node-0"}}
            await post(f"{namespace}/pods/{name}/binding", msgspec.json.encode(body))
            await post(f"{namespace}/events", EVENT)

        async def handle(pods: list[BarePod]) -> None:
            await script(keys=KEYS, args=[pods[0][2], encode(pods)])
            await bus.publish("bare.leased", encode(pods))
            for namespace, name, _, _ in pods:
                tasks.create_task(bind_pod(namespace, name))

        await receive(bus, "bare.chosen", handle)


async def receive(bus: Client, subject: str, handle: Handler) -> None:
    """Handle messages for ever, one after the other."""
    decode = msgspec.msgpack.Decoder(list[BarePod]).decode

    async def call(message: Msg) -> None:
        await handle(decode(message.data))

    await bus.subscribe(subject, queue="bare", cb=call)
    await bus.flush()
    print("ready", flush=True)
    await asyncio.Event().wait()


def encode(pods: list[BarePod]) -> bytes:
    return msgspec.msgpack.encode(pods)


@contextlib.asynccontextmanager
async def bare_services(api: str, nats_url: str, redis_url: str) -> AsyncIterator[dict[str, int]]:
    """Start the three processes; yield their pids once they listen."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name in ("watcher", "placer", "binder"):
            command = [sys.executable, "-m", "tests.benchmarks.bare_services", name]
            command += [api, nats_url, redis_url]
            process = processes[name] = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert process.stdout is not None
            await asyncio.to_thread(process.stdout.readline)
        yield {name: process.pid for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
            process.wait(20)


async def run(options: argparse.Namespace) -> None:
    bus = await nats.connect(options.nats_url)
    ledger = redis.asyncio.Redis.from_url(options.redis_url)
    match options.service:
        case "watcher":
            await watch(options.api, bus)
        case "placer":
            await place(bus, ledger)
        case _:
            await bind(options.api, bus, ledger)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("service", "api", "nats_url", "redis_url"):
        parser.add_argument(name)
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
