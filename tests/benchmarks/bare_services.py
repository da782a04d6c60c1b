"""The way of one pod without Leasehold: `python -m tests.benchmarks.pace --bare`.

Three processes exchange what a pod needs of watcher, placer and binder, through the same libraries:
watch line, message, script, message, script, message, Binding, and as many Events as the binder may
send. They decode the pod's metadata, decide nothing, and scripts only write. What they cost is what
the libraries and the kernel cost.
"""

import asyncio
import contextlib
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import msgspec
import nats
import redis.asyncio
import uvloop

from services.binder.report.event_writer import BURST, EVENTS_PER_S, TokenBucket
from shared.kubernetes.kubeconfig import read_kubeconfig, tls_context

SCRIPT = """
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', 1000, '*', 'd', ARGV[2])
"""
KEYS = ("bare:leases", "bare:feed")
AT_ONCE, PARALLEL_REQUESTS = 64, 16
LEASE = "x" * 300
"""As much as a lease adds to a message."""
ANNOTATIONS = {"leasehold.dev/lease": "x" * 600}
TARGET = {"kind": "Node", "name": "node-0"}
encode = msgspec.msgpack.encode


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


def api_session(kubeconfig):
    found = read_kubeconfig(kubeconfig)
    tls = tls_context(found) if found.server.startswith("https") else True
    return aiohttp.ClientSession(
        f"{found.server}/",
        cookie_jar=aiohttp.DummyCookieJar(),
        connector=aiohttp.TCPConnector(limit=32, ssl=tls),
        headers={"Authorization": f"Bearer {found.token}", "Content-Type": "application/json"},
    )


async def watch(kubeconfig, bus, _):
    decode, rest = msgspec.json.Decoder(WatchLine).decode, b""
    async with api_session(kubeconfig) as session:
        response = await session.get(
            "api/v1/pods?watch=true", read_bufsize=1 << 20, timeout=aiohttp.ClientTimeout()
        )
        print("ready", flush=True)
        while data := await response.content.readany():
            *lines, rest = (rest + data).split(b"\n")
            pods = [
                (pod.metadata.namespace, pod.metadata.name, pod.metadata.uid, LEASE)
                for pod in (decode(line).object for line in lines if line.strip())
                if pod.spec.scheduler_name == "leasehold" and not pod.spec.node_name
            ]
            if pods:
                await bus.publish("bare.queued", encode(pods))


async def place(_, bus, ledger):
    script = ledger.register_script(SCRIPT)

    async def handle(pods):
        for first in range(0, len(pods), AT_ONCE):
            some = pods[first : first + AT_ONCE]
            await script(keys=KEYS, args=[some[0][2], encode(some)])
            await bus.publish("bare.chosen", encode(some))

    await receive(bus, "bare.queued", handle)


async def bind(kubeconfig, bus, ledger):
    script, free = ledger.register_script(SCRIPT), asyncio.Semaphore(PARALLEL_REQUESTS)
    events = TokenBucket.full(per_s=EVENTS_PER_S, burst=BURST, now=time.monotonic())
    async with api_session(kubeconfig) as session, asyncio.TaskGroup() as tasks:

        async def post(path, body):
            data = msgspec.json.encode(body)
            async with free, session.post(f"api/v1/namespaces/{path}", data=data) as response:
                await response.read()

        async def bind_pod(namespace, name):
            binding = {"metadata": {"name": name, "annotations": ANNOTATIONS}, "target": TARGET}
            await post(f"{namespace}/pods/{name}/binding", binding)
            if events.take(time.monotonic()):
                pod = {"kind": "Pod", "namespace": namespace, "name": name}
                event = {"metadata": {"generateName": "bare-"}, "involvedObject": pod}
                message = {"type": "Normal", "reason": "Scheduled", "message": LEASE}
                await post(f"{namespace}/events", event | message)

        async def handle(pods):
            await script(keys=KEYS, args=[pods[0][2], encode(pods)])
            await bus.publish("bare.leased", encode(pods))
            for namespace, name, _, _ in pods:
                tasks.create_task(bind_pod(namespace, name))

        await receive(bus, "bare.chosen", handle)


async def receive(bus, subject, handle):
    """Handle messages for ever, one after the other."""
    decode = msgspec.msgpack.Decoder(list[tuple[str, str, str, str]]).decode

    async def call(message):
        await handle(decode(message.data))

    await bus.subscribe(subject, queue="bare", cb=call)
    await bus.flush()
    print("ready", flush=True)
    await asyncio.Event().wait()


SERVICES = {"watcher": watch, "placer": place, "binder": bind}


@contextlib.asynccontextmanager
async def bare_services(kubeconfig, up, _directory):
    """Start the three processes; yield their pids once they listen."""
    processes = {}
    try:
        for name in SERVICES:
            command = [sys.executable, "-m", "tests.benchmarks.bare_services", name]
            command += [str(kubeconfig), up.nats_url, up.valkey.url]
            process = processes[name] = subprocess.Popen(command, stdout=subprocess.PIPE)
            await asyncio.to_thread(process.stdout.readline)
        yield {name: process.pid for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
            process.wait(20)


async def run(name, kubeconfig, nats_url, redis_url):
    ledger = redis.asyncio.Redis.from_url(redis_url)
    await SERVICES[name](Path(kubeconfig), await nats.connect(nats_url), ledger)


if __name__ == "__main__":
    uvloop.run(run(*sys.argv[1:]))
