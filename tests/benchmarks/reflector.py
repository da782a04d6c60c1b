"""What one pod event costs the reflector: `python -m tests.benchmarks.reflector`.

Method: a watch body of MODIFIED events of one 3 KB pod each, for a thousand pods in turn with
rising versions, is cut, decoded and compared exactly as a watch does it, once from memory in 64 KiB
chunks and once over a real socket from another process. CPU time of this process, best of five.
"""

import asyncio
import json
import multiprocessing
import time
from contextlib import aclosing, asynccontextmanager

from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.known_objects import KnownObjects
from shared.kubernetes.kubeconfig import ClusterCredentials
from shared.kubernetes.reflector import Reflector
from shared.kubernetes.types import ApiPod
from shared.kubernetes.watch_events import EventReader, Lines, WatchEvent
from tests.support.kubernetes.scripted_apiserver import (
    ScriptedApiserver,
    lists,
    modified,
    streams,
)

EVENTS = 20_000
PODS = 1_000
CHUNK_BYTES = 64 << 10
ROUNDS = 5
CEILING_US = 30.0


def large_pod(number, version):
    """Make a pod of about 3 KB as a cluster stores it, managed fields included."""
    limits = {"cpu": "2", "memory": "8Gi", "volcano.sh/vgpu-number": "1"}
    owned = {f"f:field-{n}": {".": {}, "f:value": {}} for n in range(28)}
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {
            "name": f"train-{number}",
            "namespace": "team",
            "uid": f"00000000-0000-4000-8000-{number:012}",
            "resourceVersion": str(version),
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {"app": "train", "team": "vision", "job-name": f"train-{number}"},
            "annotations": {f"example.com/note-{n}": "a short note" for n in range(6)},
            "ownerReferences": [{"kind": "Job", "name": "train", "uid": "j", "controller": True}],
            "managedFields": [{"manager": "kubelet", "operation": "Update", "fieldsV1": owned}],
        },
        "spec": {
            "schedulerName": "volcano",
            "nodeName": "node-1",
            "priority": 0,
            "tolerations": [
                {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute"}
                for key in ("not-ready", "unreachable")
            ],
            "containers": [
                {
                    "name": "main",
                    "image": "registry.example.com/train:1",
                    "resources": {"limits": limits, "requests": limits},
                    "env": [{"name": f"SETTING_{n}", "value": "value"} for n in range(8)],
                    "volumeMounts": [{"name": "token", "mountPath": "/var/run/secrets"}],
                }
            ],
            "volumes": [{"name": "token", "projected": {"sources": [{"configMap": {}}]}}],
        },
        "status": {
            "phase": "Running",
            "conditions": [
                {"type": kind, "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
                for kind in ("Initialized", "Ready", "ContainersReady", "PodScheduled")
            ],
        },
    }


def watch_body():
    """Return the whole body of the watch."""
    events = (modified(large_pod(n % PODS, n + 1)) for n in range(EVENTS))
    return b"".join(json.dumps(e, separators=(",", ":")).encode() + b"\n" for e in events)


def chunks(body):
    """Cut the body as a socket would."""
    for start in range(0, len(body), CHUNK_BYTES):
        yield body[start : start + CHUNK_BYTES]


def from_memory(body):
    """Return CPU microseconds per event of cutting, decoding and comparing."""
    reader, lines, known = EventReader(ApiPod), Lines(), KnownObjects[ApiPod]()
    changes = 0
    started = time.process_time()
    for chunk in chunks(body):
        for line in lines.feed(chunk):
            event = reader.read_event(line)
            assert isinstance(event, WatchEvent)
            changes += len(known.upsert(event.item))
    spent_s = time.process_time() - started
    assert changes == EVENTS
    return spent_s / EVENTS * 1e6


def serve(pipe, body):
    """Serve the body to ROUNDS watches, in a process of its own."""

    async def run():
        steps = (lists(version=0), streams(*chunks(body), then="silence")) * ROUNDS
        async with ScriptedApiserver(*steps) as server:
            pipe.send(server.url)
            await asyncio.to_thread(pipe.recv)

    asyncio.run(run())


@asynccontextmanager
async def serving(body):
    """Run the server's process and yield its URL."""
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    process = spawning.Process(target=serve, args=(theirs, body))
    process.start()
    try:
        yield await asyncio.to_thread(ours.recv)
    finally:
        ours.send(None)
        await asyncio.to_thread(process.join)


async def from_socket(url):
    """Return CPU microseconds per event of a whole reflector on a real connection."""
    async with KubernetesClient(ClusterCredentials(server=url)) as kube:
        reflector = Reflector(kube, "/api/v1/pods", ApiPod)
        started, changes = time.process_time(), 0
        async with aclosing(reflector.batches()) as batches:
            async for batch in batches:
                changes += len(batch)
                if changes > EVENTS:
                    break
        return (time.process_time() - started) / EVENTS * 1e6


async def main():
    """Measure both ways and say whether the ceiling held."""
    body = watch_body()
    memory_us = min(from_memory(body) for _ in range(ROUNDS))
    async with serving(body) as url:
        socket_us = min([await from_socket(url) for _ in range(ROUNDS)])
    print(__doc__)
    print(f"{EVENTS} events of {len(body) // EVENTS} bytes")
    print(f"decode and compare        {memory_us:6.1f} µs/event (ceiling {CEILING_US:.0f})")
    print(f"whole, over a real socket {socket_us:6.1f} µs/event")
    if memory_us > CEILING_US:
        raise SystemExit(1)


if __name__ == "__main__":
    asyncio.run(main())
