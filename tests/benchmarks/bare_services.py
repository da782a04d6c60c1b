"""The way of one pod without Leasehold: `python -m tests.benchmarks.pace --bare`.

Three processes exchange what a pod needs of watcher, placer and binder, through the
same libraries: watch line, message, script, message, script, message, Binding, and as many Events
as the binder may send. They decode the pod's metadata, decide nothing, and scripts only write. What
they cost is what the libraries and the kernel cost.
"""

import argparse
import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import msgspec
import nats
import redis.asyncio
import uvloop
from nats.aio.client import Client
from nats.aio.msg import Msg

from services.binder.report.event_writer import BURST, EVENTS_PER_S, TokenBucket
from shared.kubernetes.auth import tls_context
from shared.kubernetes.kubeconfig import read_kubeconfig

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
NODE = "node-0"

BarePod = tuple[str, str, str, str]
"""Namespace, name, uid, and as many bytes as a lease."""
Handler = Callable[[list[BarePod]], Awaitable[None]]


class Metadata(msgspec.Struct):
    namespace: str
    name: str
    uid: str


class Spec(msgspec.Struct, rename="camel"):
    scheduler_name: str
    node_name: str = ""


class WatchedPod(msgspec.Struct):
    metadata: Metadata
    spec: Spec


class WatchLine(msgspec.Struct):
    type: str
    object: WatchedPod


def api_session(kubeconfig: Path) -> aiohttp.ClientSession:
    found = read_kubeconfig(kubeconfig)
    return aiohttp.ClientSession(
        f"{found.server}/",
        cookie_jar=aiohttp.DummyCookieJar(),
        connector=aiohttp.TCPConnector(
            limit=32, ssl=tls_context(found) if found.server.startswith("https") else True
        ),
        headers={"Authorization": f"Bearer {found.token}", "Content-Type": "application/json"},
    )


async def watch(kubeconfig: Path, bus: Client) -> None:
    decode = msgspec.json.Decoder(WatchLine).decode
    async with api_session(kubeconfig) as session:
        response = await session.get(
            "api/v1/pods?watch=true", read_bufsize=1 << 20, timeout=aiohttp.ClientTimeout()
        )
        print("ready", flush=True)
        rest = b""
        while data := await response.content.readany():
            *lines, rest = (rest + data).split(b"\n")
            found = [decode(line).object for line in lines if line.strip()]
            pods = [
                (pod.metadata.namespace, pod.metadata.name, pod.metadata.uid, LEASE)
                for pod in found
                if pod.spec.scheduler_name == "leasehold" and not pod.spec.node_name
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


async def bind(kubeconfig: Path, bus: Client, ledger: "redis.asyncio.Redis") -> None:
    script, free = ledger.register_script(SCRIPT), asyncio.Semaphore(PARALLEL_REQUESTS)
    events = TokenBucket.full(per_s=EVENTS_PER_S, burst=BURST, now=time.monotonic())
    async with api_session(kubeconfig) as session, asyncio.TaskGroup() as tasks:

        async def post(path: str, body: object) -> None:
            data = msgspec.json.encode(body)
            async with free, session.post(f"api/v1/namespaces/{path}", data=data) as response:
                await response.read()

        async def bind_pod(namespace: str, name: str) -> None:
            target = {"kind": "Node", "name": NODE}
            await post(
                f"{namespace}/pods/{name}/binding",
                {"metadata": {"name": name, "annotations": ANNOTATIONS}, "target": target},
            )
            if not events.take(time.monotonic()):
                return
            pod = {"kind": "Pod", "namespace": namespace, "name": name}
            event = {"metadata": {"generateName": "bare-"}, "involvedObject": pod}
            message = {"type": "Normal", "reason": "Scheduled", "message": LEASE}
            await post(f"{namespace}/events", event | message)

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
async def bare_services(
    kubeconfig: Path, nats_url: str, redis_url: str
) -> AsyncIterator[dict[str, int]]:
    """Start the three processes; yield their pids once they listen."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name in ("watcher", "placer", "binder"):
            command = [sys.executable, "-m", "tests.benchmarks.bare_services", name]
            command += [str(kubeconfig), nats_url, redis_url]
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
            await watch(options.kubeconfig, bus)
        case "placer":
            await place(bus, ledger)
        case _:
            await bind(options.kubeconfig, bus, ledger)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("service")
    parser.add_argument("kubeconfig", type=Path)
    parser.add_argument("nats_url")
    parser.add_argument("redis_url")
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
