"""What a version of Leasehold wrote while it ran: kept as files, so that later ones must read it.

`python -m tests.support.recorded NAME` records the version at hand into `tests/recorded/NAME`; do
it when a version is released, and never again for that one.
"""

import asyncio
import contextlib
import json
import sys
from base64 import b64decode, b64encode
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec
import nats
import redis.asyncio
from nats.aio.msg import Msg

import services.topology  # noqa: F401  so that every event is known
from services.node_agent.records.checkpoint import CheckpointFile
from shared.dialects.pod_groups import VOLCANO_GROUPS
from shared.dialects.volcano.vgpu import GROUP_POLICY
from shared.model.events.event import EVENTS, Event
from shared.nats import wire
from tests.support.samples import SAMPLES
from tests.support.servers.nats import NatsServer, free_port
from tests.support.servers.valkey import ValkeyServer
from tests.support.stack import PODS, Stack, gpu_pod, running, stack, vgpu
from tests.support.waiting import until

FOLDER = Path(__file__).parents[1] / "recorded"
COPY = "leasehold.dev/lease"
OF_EACH = 4
"""Messages of one subject that are kept."""


@dataclass(slots=True)
class Recorded:
    """One version's words. `accepts` is what its readers take, as JSON schemas by name."""

    messages: dict[str, list[bytes]] = field(default_factory=dict)
    """By subject: the received messages; a sample of those that were not received."""
    ledger: dict[str, list[Any]] = field(default_factory=dict)
    """Every key of Redis: its kind, and what `RESTORERS` write it from; bytes throughout."""
    copies: dict[str, str] = field(default_factory=dict)
    """The annotation `leasehold.dev/lease`, by pod."""
    checkpoints: dict[str, str] = field(default_factory=dict)
    """The agents' files, by node."""
    accepts: dict[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write it down."""
        folder.mkdir(parents=True)
        for part in PARTS:
            text = json.dumps(_texts(getattr(self, part)), indent=1, sort_keys=True)
            (folder / f"{part}.json").write_text(text + "\n")


PARTS = tuple(part.name for part in fields(Recorded))


def versions() -> list[str]:
    """Return the names of all recorded versions."""
    return sorted(folder.name for folder in FOLDER.glob("version-*"))


def recorded(version: str) -> Recorded:
    """Read what a version wrote."""
    parts = {part: json.loads((FOLDER / version / f"{part}.json").read_text()) for part in PARTS}
    parts["messages"] = {
        subject: [b64decode(text) for text in texts] for subject, texts in parts["messages"].items()
    }
    parts["ledger"] = {
        key: [kind, [b64decode(text) for text in texts]]
        for key, (kind, texts) in parts["ledger"].items()
    }
    return Recorded(**parts)


async def put_back(ledger: Mapping[str, list[Any]], client: Any) -> None:
    """Write a recorded ledger into an empty server."""
    for key, (kind, parts) in ledger.items():
        pairs = list(zip(parts[::2], parts[1::2], strict=True)) if kind != "string" else []
        if kind == "string":
            await client.set(key, parts[0])
        elif kind == "hash":
            await client.hset(key, mapping=dict(pairs))
        elif kind == "zset":
            await client.zadd(key, {member: float(score) for member, score in pairs})
        else:
            for entry, entry_fields in pairs:
                await client.xadd(
                    key, dict(msgspec.msgpack.decode(entry_fields)), id=entry.decode()
                )


async def _keys(client: Any) -> dict[str, list[Any]]:
    messages: dict[str, list[Any]] = {}
    async for key in client.scan_iter("lh*", 1000):
        kind = (await client.type(key)).decode()
        if kind == "string":
            parts = [await client.get(key)]
        elif kind == "hash":
            parts = [part for pair in (await client.hgetall(key)).items() for part in pair]
        elif kind == "zset":
            held = await client.zrange(key, 0, -1, withscores=True)
            parts = [part for member, score in held for part in (member, repr(score).encode())]
        else:
            entries = await client.xrange(key)
            parts = [
                part
                for entry, entry_fields in entries
                for part in (entry, msgspec.msgpack.encode(list(entry_fields.items())))
            ]
        messages[key.decode()] = [kind, parts]
    return messages


def _texts(value: Any) -> Any:
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if isinstance(value, dict):
        return {key: _texts(item) for key, item in value.items()}
    return [_texts(item) for item in value] if isinstance(value, list) else value


def kinds() -> dict[str, type[Event]]:
    """Return the events that there are, by subject."""
    ours = (kind for kind in EVENTS.values() if kind.__module__.startswith("shared."))
    return {kind.subject: kind for kind in ours}


def _accepts() -> dict[str, Any]:
    events = kinds()
    schemas, parts = msgspec.json.schema_components(
        [*events.values(), CheckpointFile], ref_template="#/$defs/{name}"
    )
    return {
        "events": dict(zip(events, schemas[:-1], strict=True)),
        "checkpoint": schemas[-1],
        "$defs": parts,
    }


class _MessageRecorder:
    """Receives every message on the bus, replies included."""

    def __init__(self) -> None:
        self.received: dict[str, list[bytes]] = {}
        self._answers: dict[str, str] = {}
        self._kinds = kinds()

    async def receive(self, message: Msg) -> None:
        subject = self._answers.get(message.subject) or next(
            (kind for kind in self._kinds if f".{kind}" in message.subject), ""
        )
        if message.reply and subject.endswith(".request.v1"):
            self._answers[message.reply] = subject.replace("request", "reply")
        messages = self.received.setdefault(subject, []) if subject else []
        sizes = {len(other) // 32 for other in messages}
        if len(messages) < OF_EACH and len(message.data) // 32 not in sizes:
            messages.append(message.data)


async def _live_through(whole: Stack, received: Container[str]) -> None:
    """Pods of several kinds come, run, wait, are refused and go."""
    notes = {VOLCANO_GROUPS[0]: "group-a", GROUP_POLICY: "spread"}
    several = gpu_pod("several", vgpu(1, 700, 5))
    first = several["spec"]["containers"][0]
    several["spec"]["containers"].append({**first, "name": "second"})
    pods = [
        *(gpu_pod(f"share-{n}", vgpu(1, 3000 + n, 20)) for n in range(3)),
        *(gpu_pod(f"apart-{n}", vgpu(1, 500), annotations=notes) for n in range(2)),
        gpu_pod("two", vgpu(2, 1000, 10)),
        several,
        gpu_pod("units", {"volcano.sh/gpu-memory": 512}),
        gpu_pod("filling", vgpu(2, 12000)),  # beside the others it does not fit: on the other node
    ]
    for pod in pods:
        await whole.create(pod)
    await whole.until_all(len(pods))
    for pod in (
        gpu_pod("large", vgpu(4, 15000)),
        gpu_pod("wrong", vgpu(1, 1, 101)),
    ):
        await whole.create(pod)
    for name in ("large", "wrong"):
        await whole.until(name, lambda pod: pod["status"].get("conditions"))
    await whole.kube.delete(f"{PODS}/share-2")
    await until(
        lambda: all(subject in received for subject in ("pod.terminated.v1", "leases.reply.v1"))
    )


async def record(folder: Path) -> None:
    """Run the version at hand for a while, and keep what it writes."""
    bus = NatsServer()
    store = ValkeyServer()
    port = str(free_port())
    await bus.start()
    store.start("--port", port)
    await store.ready()
    with contextlib.ExitStack() as ending:
        ending.callback(bus.kill)
        ending.callback(store.kill)
        recorder = _MessageRecorder()
        received = await nats.connect(bus.url)
        await received.subscribe(">", cb=recorder.receive)
        servers = ("--nats-url", bus.url, "--redis-url", f"redis://127.0.0.1:{port}/0")
        flags = ("--nodes", "2", "--gpus", "2xT4", *servers)
        async with stack(*flags, placers=2) as whole:
            await _live_through(whole, recorder.received)
            copies = {
                pod["metadata"]["name"]: pod["metadata"].get("annotations", {}).get(COPY)
                for pod in await whole.pods()
                if running(pod)
            }
            checkpoints = {
                file.parent.name: file.read_text() for file in whole.root.rglob("checkpoint.json")
            }
        async with redis.asyncio.Redis.from_url(store.url) as client:
            ledger = await _keys(client)
        await received.close()
    for sample in SAMPLES:
        recorder.received.setdefault(sample.subject, [wire.encode([sample])])
    Recorded(recorder.received, ledger, copies, checkpoints, _accepts()).save(folder)


if __name__ == "__main__":
    asyncio.run(record(FOLDER / sys.argv[1]))
